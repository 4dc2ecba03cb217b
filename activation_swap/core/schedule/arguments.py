# SPDX-License-Identifier: Apache-2.0
"""Arguments of the pipeline functions, where a wrong one would plan or move something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from activation_swap.core.schedule.actions import COMPUTE_KINDS, LoweredStep, compute_actions
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from activation_swap.core.schedule.actions import Action, Step

__all__ = ["check_attentions", "check_compute", "check_plan", "check_shape"]


def check_compute(action: Action) -> None:
    """Refuse an action that computes nothing.

    Raises:
        RejectedError: AS514.
    """
    _check(
        action.kind in COMPUTE_KINDS, found=action, expected="an action that computes: F, B, I, W"
    )


def check_plan(plan: Sequence[LoweredStep]) -> None:
    """Refuse a plan that was not lowered.

    Raises:
        RejectedError: AS514.
    """
    for step in plan:
        _check(
            isinstance(step, LoweredStep),
            found=f"{type(step).__name__} {step}",
            expected="LoweredStep objects, which plan_rank makes of an order",
        )


def check_attentions(order: Sequence[Step], attentions: Mapping[int, int]) -> None:
    """Refuse counts that leave a stage of the order out, or are none.

    Raises:
        RejectedError: AS514.
    """
    for stage in sorted({member.stage for _, member in compute_actions(order)}):
        count = attentions.get(stage)
        _check(
            isinstance(count, int) and count >= 0,
            found=f"attentions[{stage}] = {count}",
            expected="the number of attentions that move, for every stage of the order",
        )


def check_shape(*, stage: int, stages: int, microbatches: int) -> None:
    """Refuse a stage that a pipeline does not have, and a step of nothing.

    Raises:
        RejectedError: AS514.
    """
    _check(
        0 <= stage < stages and microbatches > 0,
        found=f"stage {stage} of {stages}, {microbatches} microbatches",
        expected="a stage from 0 to below the number of stages, and at least 1 microbatch",
    )


def _check(fits: bool, *, found: Any, expected: str) -> None:  # noqa: FBT001 - what is checked
    if not fits:
        raise Reason.PIPELINE_ARGUMENT.error(found=str(found), expected=expected)
