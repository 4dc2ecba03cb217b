# SPDX-License-Identifier: Apache-2.0
"""What is measured of a pipeline, and what its plan predicts. Nothing runs here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from activation_swap import SwapPolicy
from activation_swap.trainer.attention_bytes import AttentionBytes, AttentionShape
from activation_swap.trainer.pipeline_plan import PipelineSetup, plan_pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from activation_swap.trainer.pipeline_plan import PipelinePlan, RankPlan

__all__ = ["PipelinePoint", "expected_peak", "plan_point"]

_OTHER_BYTES_PER_TOKEN: Final = {"qwen3-30b-a3b": 147_000}
"""What a layer keeps for backward besides attention, from the peak of one stage on one H200: 72.2
GiB over the weights for 4 microbatches of 4,096 tokens in 24 layers are 197 kB a token and layer,
of which attention has 50."""
_LINK: Final = 48e9
_HEAD_KEPT: Final = 2 + 4
"""Bytes for each logit of a microbatch in flight: bf16, and what the loss saves in fp32."""
_HEAD_WORK: Final = 4 + 4
"""Bytes for each logit while the loss computes."""
_WORK_BYTES: Final = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class PipelinePoint:
    """One set-up of a pipeline.

    Attributes:
        schedule: Name of a schedule of ``torch.distributed.pipelining``.
        stages_per_rank: Stages on each rank.
        microbatches: Microbatches in a step.
        tokens: Tokens in a microbatch of one sequence.
    """

    schedule: str
    stages_per_rank: int
    microbatches: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> PipelinePoint:
        """Read ``SCHEDULE:STAGES_PER_RANKxMICROBATCHESxTOKENS``."""
        schedule, _, numbers = text.partition(":")
        stages, microbatches, tokens = map(int, numbers.split("x"))
        return cls(
            schedule=schedule, stages_per_rank=stages, microbatches=microbatches, tokens=tokens
        )

    def __str__(self) -> str:
        return f"{self.schedule}:{self.stages_per_rank}x{self.microbatches}x{self.tokens}"


def plan_point(
    point: PipelinePoint,
    config: Any,
    *,
    shape: str,
    pp_size: int,
    layers: int,
    policy: Mapping[str, Any],
) -> PipelinePlan:
    """Plan a point as ``activation-swap plan`` does.

    Args:
        point: What is measured.
        config: Of the model, in bf16.
        shape: The preset that it came from.
        pp_size: Ranks of the pipeline.
        layers: Decoder layers of a rank.
        policy: Fields of ``SwapPolicy``.
    """
    attention = AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        itemsize=2,
    )
    min_bytes = SwapPolicy(**policy).min_bytes
    return plan_pipeline(
        PipelineSetup(
            schedule=point.schedule,
            pp_size=pp_size,
            stages_per_rank=point.stages_per_rank,
            microbatches=point.microbatches,
            layers=layers * pp_size,
            attention=AttentionBytes.of(attention, tokens=point.tokens, min_bytes=min_bytes),
            other_bytes=_OTHER_BYTES_PER_TOKEN.get(shape, 0) * point.tokens,
            link_bytes_per_second=_LINK,
        )
    )


def expected_peak(
    point: PipelinePoint, planned: RankPlan, *, mode: str, weights: int, vocabulary: int | None
) -> int:
    """Return about how many bytes a rank's peak will be; rather too many.

    Args:
        point: What is measured.
        planned: The rank's part of the plan.
        mode: ``none`` or ``attention``.
        weights: What is allocated before the step.
        vocabulary: Size of the vocabulary, on the rank of the head.
    """
    chunks = planned.peak_bytes_none if mode == "none" else planned.peak_bytes
    head = 0
    if vocabulary is not None:
        # A looping schedule has as many chunks of every stage.
        in_flight = -(-planned.chunks_in_flight_peak // point.stages_per_rank)
        head = point.tokens * vocabulary * (in_flight * _HEAD_KEPT + _HEAD_WORK)
    return weights + chunks + head + _WORK_BYTES
