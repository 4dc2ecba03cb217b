# SPDX-License-Identifier: Apache-2.0
"""When each chunk of a rank is written, first needed and last needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from activation_swap.core.schedule.actions import Action, Kind, compute_actions
from activation_swap.core.schedule.grid import format_grid
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.actions import Step

__all__ = ["ChunkLife", "OrderProblem", "find_chunks", "find_order_problem"]


class ChunkLife(NamedTuple):
    """Life of one chunk's saved tensors, in indices of compute steps.

    Attributes:
        key: Stage and microbatch.
        forward: The step that saves the tensors.
        first_use: The step that unpacks them first.
        last_use: The step after which they are gone.
        gap: Number of steps strictly between the forward and the first use that compute anything,
            so that copies can run beside them.
        leaves: The first of these; or, where there is none, the step before the first use.
        returns: The last of these; or, where there is none, the step before the first use.
    """

    key: GroupKey
    forward: int
    first_use: int
    last_use: int
    gap: int
    leaves: int
    returns: int


class OrderProblem(NamedTuple):
    """Why an order is not one of a training step.

    Attributes:
        step: Index of the offending step.
        text: What is wrong with it.
    """

    step: int
    text: str


_LEGAL: Mapping[tuple[Kind, ...], tuple[Kind, ...]] = {
    (): (Kind.FORWARD,),
    (Kind.FORWARD,): (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT),
    (Kind.FORWARD, Kind.BACKWARD_INPUT): (Kind.BACKWARD_WEIGHT,),
}


def find_order_problem(order: Sequence[Step]) -> OrderProblem | None:
    """Find the first step that a training step could not have, or ``None``."""
    seen: dict[GroupKey, tuple[Kind, ...]] = {}
    latest: dict[GroupKey, int] = {}
    for index, step in enumerate(order):
        if not step.members:
            return OrderProblem(index, "a step without any action")
    for index, action in compute_actions(order):
        history = seen.get(action.key, ())
        legal = _LEGAL.get(history, ())
        if action.kind not in legal:
            expected = " or ".join(legal) or "nothing more"
            return OrderProblem(index, f"{action} where {expected} of this chunk could follow")
        if latest.get(action.key) == index:
            return OrderProblem(index, f"{action} overlaps an earlier action of its own chunk")
        seen[action.key] = (*history, action.kind)
        latest[action.key] = index
    for key, history in seen.items():
        if history in _LEGAL:
            last = Action(key.stage, history[-1], key.microbatch)
            return OrderProblem(latest[key], f"{last} without the backward that must follow")
    return None


def find_chunks(
    order: Sequence[Step], *, deferred_weight_stages: Collection[int] = ()
) -> tuple[ChunkLife, ...]:
    """Read the life of every chunk off a compute order.

    In a split backward the first stage of a pipeline has no input gradient to compute: its ``I``
    runs nothing and its tensors are needed in ``W`` only. A stage with a ``dw_builder`` runs its
    whole backward in ``I``. On every other stage ``I`` needs all saved tensors, and ``W`` needs
    some of them again.

    Args:
        order: What one rank computes.
        deferred_weight_stages: Stages with a ``dw_builder``.

    Returns:
        The chunks in the order of their forwards.

    Raises:
        RejectedError: AS502, when the order is not one of a training step.
    """
    problem = find_order_problem(order)
    if problem is not None:
        raise Reason.SCHEDULE_ORDER.error(
            found=problem.text,
            where=f"step {problem.step}",
            trace=tuple(format_grid({0: order}, mark=(0, problem.step)).splitlines()),
        )
    steps: dict[GroupKey, list[int]] = {}
    for index, action in compute_actions(order):
        steps.setdefault(action.key, []).append(index)
    computing = [
        index
        for index, step in enumerate(order)
        if not all(_runs_nothing(member, deferred_weight_stages) for member in step.members)
    ]
    chunks = []
    for key, (forward, *uses) in steps.items():
        first, last = uses[0], uses[-1]
        if key.stage in deferred_weight_stages:
            last = first
        elif key.stage == 0:
            first = last
        after, before = bisect_right(computing, forward), bisect_left(computing, first)
        gap = before - after
        leaves, returns = (computing[after], computing[before - 1]) if gap else (first - 1,) * 2
        chunks.append(ChunkLife(key, forward, first, last, gap, leaves, returns))
    return tuple(chunks)


def _runs_nothing(action: Action, deferred_weight_stages: Collection[int]) -> bool:
    first_stage = action.stage == 0 and action.stage not in deferred_weight_stages
    return first_stage and action.kind is Kind.BACKWARD_INPUT
