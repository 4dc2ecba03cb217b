# SPDX-License-Identifier: Apache-2.0
"""Compute orders of the two single-stage schedules, by formula.

``torch`` runs both as hard-coded loops and lists them apart from the loops: the list of
``Schedule1F1B`` begins with the wrong microbatch on the last rank in every release that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from activation_swap.core.schedule.actions import Action, Kind, Step
from activation_swap.core.schedule.arguments import check_shape

if TYPE_CHECKING:
    from activation_swap.core.schedule.actions import ComputeOrder

__all__ = ["gpipe_order", "one_f_one_b_order"]


def gpipe_order(*, stage: int, microbatches: int) -> ComputeOrder:
    """All forwards, then all backwards.

    Args:
        stage: Index of this rank's stage.
        microbatches: Microbatches per step.

    Returns:
        What the rank computes.

    Raises:
        RejectedError: AS514, when there is no such stage.
    """
    check_shape(stage=stage, stages=stage + 1, microbatches=microbatches)
    return tuple(
        _step(stage, kind, microbatch)
        for kind in (Kind.FORWARD, Kind.FULL_BACKWARD)
        for microbatch in range(microbatches)
    )


def one_f_one_b_order(*, stage: int, stages: int, microbatches: int) -> ComputeOrder:
    """``stages - stage`` forwards, then a backward and a forward by turns, then the rest.

    Args:
        stage: Index of this rank's stage.
        stages: Number of stages.
        microbatches: Microbatches per step.

    Returns:
        What the rank computes.

    Raises:
        RejectedError: AS514, when there is no such stage.
    """
    check_shape(stage=stage, stages=stages, microbatches=microbatches)
    warmup = min(microbatches, stages - stage)
    order = [_step(stage, Kind.FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        order.append(_step(stage, Kind.FULL_BACKWARD, microbatch))
        if warmup + microbatch < microbatches:
            order.append(_step(stage, Kind.FORWARD, warmup + microbatch))
    return tuple(order)


def _step(stage: int, kind: Kind, microbatch: int) -> Step:
    return Step((Action(stage, kind, microbatch),))
