# SPDX-License-Identifier: Apache-2.0
"""How many attention groups of a rank are on the device, step by step."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from activation_swap._verbs import Keep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.liveness import ChunkLife

__all__ = ["MIN_GAP", "in_flight", "residency", "resident_spans"]

MIN_GAP = 2
"""Steps with compute between forward and first use that a whole chunk needs to move: in the first
its last attention leaves, in the last it comes back."""

_WINDOW = 2
"""Attention groups of a moving chunk on the device while it computes: the one that computes and
the one whose copy runs under it."""


def resident_spans(chunk: ChunkLife, *, attentions: int, keep: Keep) -> list[tuple[int, int, int]]:
    """Resident attention groups of one chunk as ``(first step, step after the last, groups)``.

    Args:
        chunk: When the chunk is written and needed.
        attentions: Number of attentions in the stage.
        keep: What the plan leaves on the device.
    """
    forward, use = chunk.forward, chunk.first_use
    if keep is Keep.ALL:
        return [(forward, chunk.last_use + 1, attentions)]
    window = min(attentions, _WINDOW)
    tail = min(attentions, 1)
    spans = [(forward, forward + 1, window)]
    if keep is Keep.TAIL:
        spans.append((forward + 1, use, tail))
    else:
        spans.extend([(forward + 1, chunk.leaves + 1, tail), (chunk.returns, use, tail)])
    if chunk.last_use > use:
        # The graph is retained from I to W, and so is everything that I brought back.
        spans.append((use, chunk.last_use + 1, attentions))
    else:
        spans.append((use, use + 1, window))
    return spans


def residency(
    chunks: Iterable[ChunkLife],
    keeps: Mapping[GroupKey, Keep],
    *,
    attentions: Mapping[int, int],
    steps: int,
) -> list[int]:
    """Simulate the attention groups on the device during each compute step.

    Args:
        chunks: The rank's chunks.
        keeps: What stays, by chunk. A chunk that is not listed stays whole.
        attentions: Number of attentions, by stage.
        steps: Number of compute steps.

    Returns:
        The number of groups, by step.
    """
    change = [0] * (steps + 1)
    for chunk in chunks:
        keep = keeps.get(chunk.key, Keep.ALL)
        count = attentions[chunk.key.stage]
        for first, after, groups in resident_spans(chunk, attentions=count, keep=keep):
            change[first] += groups
            change[after] -= groups
    return list(accumulate(change[:-1]))


def in_flight(chunks: Iterable[ChunkLife], *, weights: Mapping[int, int], steps: int) -> list[int]:
    """Sum a weight of all chunks between their forward and their last use, by step.

    With the number of attentions as weights this is the residency without a swap. With a number of
    bytes it is what else the chunks keep on the device, which no swap moves.

    Args:
        chunks: The rank's chunks.
        weights: Weight of a chunk, by stage.
        steps: Number of compute steps.
    """
    return residency(chunks, {}, attentions=weights, steps=steps)
