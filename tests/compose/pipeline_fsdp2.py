# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules over stages that FSDP2 shards: two stages times two replicas."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from activation_swap import TrainingSetup, registry
from activation_swap.trainer.stage import Stage, prune
from activation_swap.trainer.stage_split import split_layers
from tests.compose.combination import Combination
from tests.compose.run import EVERYTHING, Kind, Run, compare
from tests.compose.tiny_model import LAYERS, batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]

_RANKS = 2
_MICROBATCHES = 4


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of logits ``[batch, sequence, vocabulary]``."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def train(run: Run, *, schedule: str, stages_per_rank: int, apply_first: bool) -> None:
    """Train this rank's stages, each a part of the tiny model."""
    mesh = init_device_mesh("cpu", (_RANKS, 2), mesh_dim_names=("pipeline", "data"))
    rank = mesh["pipeline"].get_local_rank()
    count = _RANKS * stages_per_rank
    split = split_layers(LAYERS, count)
    stages = []
    for index in range(rank, count, _RANKS):
        ends = {"first": index == 0, "last": index == count - 1}
        stages.append(Stage(prune(tiny_model(), split[index], **ends), **ends))
    if apply_first:
        _apply(run, stages)
    for stage in stages:
        for layer in _layers(stage):
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(stage, mesh=mesh["data"])
    if not apply_first:
        _apply(run, stages)
    pipelined = [
        PipelineStage(stage, index, count, torch.device("cpu"), group=mesh["pipeline"].get_group())
        for index, stage in zip(range(rank, count, _RANKS), stages, strict=True)
    ]
    kind: Any = get_schedule_class(schedule)
    runner = kind(
        pipelined if stages_per_rank > 1 else pipelined[0],
        n_microbatches=_MICROBATCHES,
        loss_fn=loss_of,
    )
    run.swap.attach(runner)
    for step in range(run.steps):
        tokens = batch(2 * step + mesh["data"].get_local_rank(), rows=_MICROBATCHES)["input_ids"]
        inputs = (tokens,) if rank == 0 else ()
        losses: list[torch.Tensor] = []
        last = any(stage.is_last for stage in pipelined)
        with run.step():
            runner.step(*inputs, target=tokens if last else None, losses=losses)
        for index, stage in enumerate(stages):
            run.record(stage, *losses, part=f"{index}.")
            losses = []
            stage.zero_grad()


def _layers(stage: Any) -> list[Any]:
    return [module for name, module in stage.named_modules() if re.search(r"layers\.\d+$", name)]


def _apply(run: Run, stages: list[Stage]) -> None:
    modules = [stage.model for stage in stages]
    if run.kind is Kind.SWAPPED:
        setup = TrainingSetup(pp_size=_RANKS)
        run.watch(registry.apply("attention", modules, setup=setup, policy=EVERYTHING))
    else:
        for module in modules:
            run.apply(module)


def _combinations() -> Iterator[Combination]:
    for schedule, stages in (("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2)):
        for first in (True, False):
            scenario = partial(train, schedule=schedule, stages_per_rank=stages, apply_first=first)
            yield Combination(
                tool="PP x FSDP2",
                name=f"{'apply, then shard' if first else 'shard, then apply'}; {schedule}",
                check=partial(compare, scenario, pipeline=True),
                ranks=4,
                quick=schedule == "InterleavedZeroBubble" and not first,
            )


COMBINATIONS = tuple(_combinations())
