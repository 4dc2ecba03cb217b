# SPDX-License-Identifier: Apache-2.0
"""When each compute step of each rank runs: the bubbles of a pipeline, from durations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from activation_swap.core.schedule.actions import Kind
from activation_swap.core.schedule.grid import format_grid
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from activation_swap.core.schedule.actions import Action, ComputeOrder

__all__ = ["Interval", "simulate_time"]


class Interval(NamedTuple):
    """Begin and end of a compute step, in the unit of the durations."""

    begin: float
    end: float


class _Done(NamedTuple):
    """An event that other actions wait for: a forward, or the input gradient, of one chunk."""

    forward: bool
    stage: int
    microbatch: int


def simulate_time(
    orders: Mapping[int, ComputeOrder], duration: Callable[[Action], float]
) -> dict[int, list[Interval]]:
    """Run the orders of all ranks against their data dependencies.

    A forward waits for the forward of the stage before, a backward (or input gradient) for that of
    the stage after. Sends and receives take no time. The members of an overlapped step run one
    after the other, as torch runs them unless a trainer registers a function of its own.

    Args:
        orders: Compute order by rank, over all stages of the pipeline.
        duration: Time of one action.

    Returns:
        The interval of each compute step, by rank.

    Raises:
        RejectedError: AS507 when ranks wait for each other, or for what no rank computes.
    """
    last_stage = max(
        member.stage for order in orders.values() for step in order for member in step.members
    )
    done: dict[_Done, float] = {}
    waiting: dict[_Done, list[int]] = {}
    intervals: dict[int, list[Interval]] = {rank: [] for rank in orders}
    runs = {
        rank: _run(order, intervals[rank], done, last_stage=last_stage, duration=duration)
        for rank, order in orders.items()
    }
    ready = list(orders)
    while ready:
        rank = ready.pop()
        # Each rank yields what it published, and what it waits for before it can go on.
        for published, needed in runs[rank]:
            if published is not None:
                ready.extend(waiting.pop(published, ()))
            if needed is not None and needed not in done:
                waiting.setdefault(needed, []).append(rank)
                break
    if waiting:
        stuck, rank = next((need, ranks[0]) for need, ranks in waiting.items())
        step = len(intervals[rank])
        raise Reason.SCHEDULE_DEADLOCK.error(
            where=f"rank {rank}, step {step}",
            found=f"{'F' if stuck.forward else 'B'} of stage {stuck.stage}, microbatch "
            f"{stuck.microbatch} is never reached",
            trace=tuple(format_grid(orders, mark=(rank, step)).splitlines()),
        )
    return intervals


def _run(
    order: ComputeOrder,
    intervals: list[Interval],
    done: dict[_Done, float],
    *,
    last_stage: int,
    duration: Callable[[Action], float],
) -> Iterator[tuple[_Done | None, _Done | None]]:
    """Run one rank; yield ``(published event, event to wait for)``."""
    now = 0.0
    for step in order:
        begin: float | None = None
        for action in step.members:
            needed = _needed(action, last_stage)
            if needed is not None:
                yield None, needed
                now = max(now, done[needed])
            begin = now if begin is None else begin
            now += duration(action)
            if action.kind is not Kind.BACKWARD_WEIGHT:
                event = _Done(action.kind is Kind.FORWARD, action.stage, action.microbatch)
                done[event] = now
                yield event, None
        intervals.append(Interval(now if begin is None else begin, now))


def _needed(action: Action, last_stage: int) -> _Done | None:
    if action.kind is Kind.FORWARD:
        return _Done(True, action.stage - 1, action.microbatch) if action.stage else None
    if action.kind is Kind.BACKWARD_WEIGHT or action.stage == last_stage:
        return None
    return _Done(False, action.stage + 1, action.microbatch)
