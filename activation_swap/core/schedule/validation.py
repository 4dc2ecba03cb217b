# SPDX-License-Identifier: Apache-2.0
"""Check a lowered schedule against the rules that make it worth running."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Action, Kind
from activation_swap.core.schedule.grid import format_grid
from activation_swap.core.schedule.liveness import find_chunks
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.actions import LoweredStep
    from activation_swap.core.schedule.liveness import ChunkLife

__all__ = ["validate"]


class _Placed(NamedTuple):
    """A swap action with its place: the boundary between step ``at - 1`` and step ``at``."""

    at: int
    step: int
    action: Action


def validate(
    plan: Sequence[LoweredStep], *, rank: int = 0, deferred_weight_stages: Collection[int] = ()
) -> None:
    """Check every rule of a plan.

    Every chunk is named by one SET_GROUP right before its forward. OFFLOAD comes right after the
    forward, WAIT_OFFLOAD after it and before the first use. A reload is launched after
    WAIT_OFFLOAD, waited for, and both before the first use. Nothing is launched or waited for
    twice, and a chunk that stays on the device is neither offloaded nor reloaded.

    Args:
        plan: The lowered schedule of one rank.
        rank: Named in the error.
        deferred_weight_stages: Stages with a ``dw_builder``.

    Raises:
        RejectedError: AS502, when the compute order is not one of a training step; AS503, with
            the grid and a marker, when a rule is broken.
    """
    chunks = find_chunks(
        [lowered.step for lowered in plan], deferred_weight_stages=deferred_weight_stages
    )
    placed: dict[GroupKey, list[_Placed]] = {chunk.key: [] for chunk in chunks}
    for item in _placed(plan):
        if item.action.key not in placed:
            _reject(plan, rank, item.step, f"{item.action} of a chunk that is never computed")
        placed[item.action.key].append(item)
    for chunk in chunks:
        items = placed[chunk.key]
        if not items:
            name = _name(chunk.key)
            _reject(plan, rank, chunk.forward, f"no SET_GROUP before the forward of {name}")
        for step, problem in _problems(chunk, items):
            _reject(plan, rank, step, problem)


def _placed(plan: Sequence[LoweredStep]) -> Iterator[_Placed]:
    for step, lowered in enumerate(plan):
        for action in lowered.before:
            yield _Placed(step, step, action)
        for action in lowered.after:
            yield _Placed(step + 1, step, action)


_SEQUENCES = {
    Keep.ALL: (Kind.SET_GROUP,),
    Keep.TAIL: (Kind.SET_GROUP, Kind.OFFLOAD, Kind.WAIT_OFFLOAD),
    Keep.NOTHING: (
        Kind.SET_GROUP,
        Kind.OFFLOAD,
        Kind.WAIT_OFFLOAD,
        Kind.RELOAD,
        Kind.WAIT_RELOAD,
    ),
}


def _problems(chunk: ChunkLife, items: Sequence[_Placed]) -> Iterator[tuple[int, str]]:
    """Step and description of every broken rule of one chunk."""
    name = _name(chunk.key)
    expected = _SEQUENCES[items[0].action.keep]
    for item, kind in zip(items, expected, strict=False):
        if item.action.kind is not kind:
            yield item.step, f"{item.action} where {kind} of {name} must come"
    if len(items) > len(expected):
        extra = items[len(expected)]
        yield extra.step, f"{extra.action} after {expected[-1]} ended the moves of {name}"
    elif len(items) < len(expected):
        yield items[-1].step, f"{items[-1].action} is not followed by {expected[len(items)]}"
    for item in items:
        kind, after_forward = item.action.kind, item.at == chunk.forward + 1
        if kind is Kind.SET_GROUP and item.at != chunk.forward:
            yield item.step, f"{item.action} is not right before the forward of {name}"
        elif kind is Kind.OFFLOAD and not after_forward:
            yield item.step, f"{item.action} is not right after the forward of {name}"
        elif item.at > chunk.first_use:
            yield item.step, f"{item.action} comes after the first use of {name}"


def _name(key: GroupKey) -> str:
    return f"stage {key.stage}, microbatch {key.microbatch}"


def _reject(plan: Sequence[LoweredStep], rank: int, step: int, problem: str) -> NoReturn:
    raise Reason.SCHEDULE_PLAN.error(
        found=problem,
        where=f"rank {rank}, step {step}",
        trace=tuple(format_grid({rank: plan}, mark=(rank, step)).splitlines()),
    )
