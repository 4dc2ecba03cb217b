# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch built in one process, on a process group that talks to nobody."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEDULES", "Attention", "build_schedule", "fake_world", "stage_indices"]

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Name of every schedule class, with the stages per rank that the tests give it."""


class Attention(nn.Linear):
    """Stands in for a module whose saved tensors would move."""


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a group in which every communication returns at once."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_indices(name: str, rank: int, size: int) -> list[int]:
    """Return the stages of a rank: V-shaped schedules fold back, the others wrap around."""
    if SCHEDULES[name] == 1:
        return [rank]
    if name in {"ZBVZeroBubble", "DualPipeV"}:
        return [rank, 2 * size - 1 - rank]
    return [rank, rank + size]


def build_schedule(name: str, *, rank: int, size: int, microbatches: int, layers: int = 2) -> Any:
    """Build a schedule over stages of ``layers`` attentions each."""
    kind = get_schedule_class(name)
    stages = [
        PipelineStage(
            nn.Sequential(*(Attention(4, 4) for _ in range(layers))),
            index,
            size * SCHEDULES[name],
            torch.device("cpu"),
        )
        for index in stage_indices(name, rank, size)
    ]
    single = SCHEDULES[name] == 1
    loss = nn.MSELoss()
    return kind(stages[0] if single else stages, n_microbatches=microbatches, loss_fn=loss)
