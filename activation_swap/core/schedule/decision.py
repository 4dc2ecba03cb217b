# SPDX-License-Identifier: Apache-2.0
"""Which chunks are worth moving: no traffic where the peak does not fall."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from activation_swap._verbs import Keep
from activation_swap.core.schedule.simulation import (
    MIN_GAP,
    in_flight,
    residency,
    resident_spans,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.liveness import ChunkLife

__all__ = ["decide", "move_all"]


def move_all(chunks: Sequence[ChunkLife], *, attentions: Mapping[int, int]) -> dict[GroupKey, Keep]:
    """Move every chunk as far as its gap allows.

    A chunk whose backward follows within fewer than ``MIN_GAP`` steps leaves its last attention on
    the device: there is no time to bring it back. A stage with one attention then moves nothing.
    """
    keeps = {}
    for chunk in chunks:
        if chunk.gap >= MIN_GAP and attentions[chunk.key.stage] > 0:
            keeps[chunk.key] = Keep.NOTHING
        else:
            keeps[chunk.key] = Keep.TAIL if attentions[chunk.key.stage] > 1 else Keep.ALL
    return keeps


def decide(
    chunks: Sequence[ChunkLife], *, attentions: Mapping[int, int], steps: int
) -> dict[GroupKey, Keep]:
    """Choose what stays on the device, so that the peak is the lowest with the least traffic.

    Starts from the plan that moves everything and keeps chunks, the shortest gap first, as long as
    the peak does not rise. What else a chunk holds on the device (everything but attention) is
    not known here and weighs on steps with many chunks in flight. So a kept chunk may fill a step
    only up to what the moving plan has at a step with at least as much in flight: then the peak
    does not rise, whatever the rest weighs. If moving everything does not lower the peak, this
    rule keeps everything.

    Args:
        chunks: The rank's chunks.
        attentions: Number of attentions, by stage.
        steps: Number of compute steps.

    Returns:
        What stays, for every chunk.
    """
    keeps = move_all(chunks, attentions=attentions)
    resident = residency(chunks, keeps, attentions=attentions, steps=steps)
    ceiling = _ceiling(resident, in_flight(chunks, weights=attentions, steps=steps))
    slack = [high - now for high, now in zip(ceiling, resident, strict=True)]
    for chunk in sorted(chunks, key=lambda chunk: (chunk.gap, chunk.forward)):
        keep = keeps[chunk.key]
        if keep is Keep.ALL:
            continue
        count = attentions[chunk.key.stage]
        rises = _rises(chunk, attentions=count, keep=keep)
        if all(min(slack[first:after]) >= rise for first, after, rise in rises):
            keeps[chunk.key] = Keep.ALL
            for first, after, rise in rises:
                slack[first:after] = [free - rise for free in slack[first:after]]
    return keeps


def _ceiling(resident: Sequence[int], flying: Sequence[int]) -> list[int]:
    """By step, the most groups at any step that has at least as much in flight."""
    ceiling = [0] * len(resident)
    highest = 0
    by_flight = sorted(range(len(resident)), key=flying.__getitem__, reverse=True)
    for _, group in groupby(by_flight, key=flying.__getitem__):
        steps = list(group)
        highest = max(highest, *(resident[step] for step in steps))
        for step in steps:
            ceiling[step] = highest
    return ceiling


def _rises(chunk: ChunkLife, *, attentions: int, keep: Keep) -> list[tuple[int, int, int]]:
    """Spans of steps in which keeping the chunk adds groups, with the number that it adds."""
    spans = sorted(resident_spans(chunk, attentions=attentions, keep=keep), key=itemgetter(0))
    rises = []
    cursor = chunk.forward
    for first, after, groups in spans:
        rises.append((cursor, first, attentions))
        rises.append((first, after, attentions - groups))
        cursor = after
    return [(first, after, rise) for first, after, rise in rises if after > first and rise > 0]
