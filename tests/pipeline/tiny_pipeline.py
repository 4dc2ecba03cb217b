# SPDX-License-Identifier: Apache-2.0
"""Tiny real Qwen3-MoE models under real schedules, and what one training step of them leaves."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from activation_swap.trainer.stage import Stage, prune
from tests.schedule.fake_world import SCHEDULES, stage_indices

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Pipeline", "StepRecord", "loss_of", "recorded_calls", "tiny_model"]

VOCABULARY = 97


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of logits ``[batch, sequence, vocabulary]``."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tiny_model(layers: int, dtype: torch.dtype, *, seed: int) -> Qwen3MoeForCausalLM:
    """Return a model with seeded weights."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).to(dtype).train()


@dataclass
class StepRecord:
    """What one step left on one rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def equals(self, other: StepRecord) -> bool:
        """Whether losses and gradients have equal bits, and calls the same order."""
        return (
            self.gradients.keys() == other.gradients.keys()
            and len(self.losses) == len(other.losses)
            and all(map(torch.equal, self.losses, other.losses))
            and all(torch.equal(g, other.gradients[name]) for name, g in self.gradients.items())
            and self.calls == other.calls
        )


class Pipeline:
    """This rank's stages of a tiny model under a schedule.

    Args:
        name: Name of the schedule class.
        microbatches: Per step.
        dtype: Of weights and activations.
        layers_per_stage: Decoder layers of each stage.
        schedule_class: Used in place of the class of this name.
        log: Where :func:`recorded_calls` writes.
    """

    def __init__(
        self,
        name: str,
        *,
        microbatches: int,
        dtype: torch.dtype = torch.float32,
        layers_per_stage: int = 2,
        schedule_class: Any = None,
        log: list[str] | None = None,
    ) -> None:
        self._log = [] if log is None else log
        rank, size = dist.get_rank(), dist.get_world_size()
        count = size * SCHEDULES[name]
        self.microbatches = microbatches
        self.modules = []
        stages = []
        for index in stage_indices(name, rank, size):
            ends = {"first": index == 0, "last": index == count - 1}
            model = tiny_model(layers_per_stage, dtype, seed=index)
            self.modules.append(prune(model, range(layers_per_stage), **ends))
            module = Stage(self.modules[-1], **ends)
            stages.append(PipelineStage(module, index, count, torch.device("cpu")))
        self.stages = stages
        single = SCHEDULES[name] == 1
        kind = schedule_class or torch_schedules.get_schedule_class(name)
        self.schedule = kind(
            stages[0] if single else stages, n_microbatches=microbatches, loss_fn=loss_of
        )

    def step(self, seed: int, *, sequence: int = 64) -> StepRecord:
        """Train on random tokens; every rank draws the same."""
        record = StepRecord()
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        tokens = self._tokens(seed, sequence)
        self._log.clear()
        self._run(self.schedule.step, tokens, record)
        record.calls = list(self._log)
        record.gradients = {
            f"{stage.stage_index}.{name}": weight.grad.clone()
            for stage, module in zip(self.stages, self.modules, strict=True)
            for name, weight in module.named_parameters()
            if weight.grad is not None
        }
        return record

    def evaluate(self, seed: int, *, sequence: int = 64) -> StepRecord:
        """Evaluate on random tokens, without ``no_grad``, as a careless trainer would."""
        record = StepRecord()
        self._run(self.schedule.eval, self._tokens(seed, sequence), record)
        return record

    def _tokens(self, seed: int, sequence: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (self.microbatches, sequence), generator=generator)

    def _run(self, call: Any, tokens: torch.Tensor, record: StepRecord) -> None:
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        losses: list[torch.Tensor] = []
        call(*((tokens,) if first else ()), target=tokens if last else None, losses=losses)
        record.losses = [loss.detach().clone() for loss in losses]


_STAGE_METHODS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
)


@contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """Write down what schedules call on stages, and what they send and receive.

    Enter it before anything wraps a method of a stage: the classes are what is watched.
    """
    log: list[str] = []
    with ExitStack() as stack:
        for name in _STAGE_METHODS:
            stack.enter_context(_recorded(PipelineStage, name, log, _describe_call))
        for name in ("_batch_p2p", "_sorted_batch_p2p"):
            stack.enter_context(_recorded(torch_schedules, name, log, _describe_p2p))
        yield log


def _describe_call(name: str, stage: Any, microbatch: int, *_: Any, **options: Any) -> str:
    full = options.get("full_backward", True)
    return f"{name}({stage.stage_index}, {microbatch}{'' if full else ', input'})"


def _describe_p2p(name: str, ops: Any, *_: Any, **__: Any) -> str:
    described = [f"{op.op.__name__} {op.peer} {list(op.tensor.shape)}" for op in ops]
    return f"{name}: {', '.join(described)}"


@contextmanager
def _recorded(owner: Any, name: str, log: list[str], describe: Any) -> Iterator[None]:
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        log.append(describe(name, *args, **options))
        return original(*args, **options)

    with mock.patch.object(owner, name, call):
        yield
