# SPDX-License-Identifier: Apache-2.0
"""A schedule of torch over the stages of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import ProcessGroup

    from activation_swap.trainer.stage import Stage

__all__ = ["build_schedule", "next_token_loss"]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each token from those before it.

    Args:
        logits: ``[batch, sequence, vocabulary]``.
        tokens: ``[batch, sequence]``.
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_schedule(
    name: str,
    stages: Mapping[int, Stage],
    *,
    count: int,
    microbatches: int,
    device: torch.device,
    group: ProcessGroup,
) -> Any:
    """Build a schedule that trains on :func:`next_token_loss`.

    Args:
        name: Of a schedule of ``torch.distributed.pipelining``.
        stages: This rank's, by their index in the pipeline.
        count: Stages of the whole pipeline.
        microbatches: Microbatches in a step.
        device: Where the stages are.
        group: The ranks of the pipeline.
    """
    built = [
        PipelineStage(stage, index, count, device, group=group) for index, stage in stages.items()
    ]
    kind: Any = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(built[0] if single else built, n_microbatches=microbatches, loss_fn=next_token_loss)
