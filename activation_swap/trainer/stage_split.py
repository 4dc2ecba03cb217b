# SPDX-License-Identifier: Apache-2.0
"""Which layers each pipeline stage has."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["split_layers", "usual_stages_per_rank"]

_SINGLE_STAGE = {"1f1b", "gpipe"}


def usual_stages_per_rank(schedule: str) -> int:
    """Return 1 for the schedules with one stage on each rank, and 2 for the others."""
    return 1 if schedule.lower() in _SINGLE_STAGE else 2


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Split decoder layers over stages as evenly as whole layers allow.

    What does not divide goes to the first stages: the last one has the head and the loss.

    Args:
        layers: Number of decoder layers.
        stages: Number of stages.

    Returns:
        The layer numbers of each stage. Stages beyond the number of layers have none.
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(range(first, after) for first, after in pairwise(starts))
