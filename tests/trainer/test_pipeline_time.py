# SPDX-License-Identifier: Apache-2.0
"""The pipeline's clock: dependencies between ranks, bubbles, deadlocks."""

from __future__ import annotations

import pytest

from activation_swap.core.schedule.actions import Action, Kind, parse_plan
from activation_swap.core.schedule.torch_orders import compute_orders
from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.pipeline_time import Interval, simulate_time
from tests.schedule.fake_world import SCHEDULES

pytestmark = pytest.mark.unit

DURATIONS = {
    Kind.FORWARD: 1.0,
    Kind.FULL_BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


def duration(action: Action) -> float:
    return DURATIONS[action.kind]


def test_1f1b_has_the_bubble_of_the_literature() -> None:
    """(ranks - 1) forwards and backwards of idle time on every rank."""
    orders = compute_orders("1F1B", pp_size=4, microbatches=8, stages_per_rank=1)
    intervals = simulate_time(orders, duration)
    assert max(steps[-1].end for steps in intervals.values()) == (8 + 3) * 3
    assert intervals[0][0] == Interval(0, 1)
    assert intervals[3][:2] == [Interval(3, 4), Interval(4, 6)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_step_begins_before_its_input(name: str) -> None:
    orders = compute_orders(name, pp_size=4, microbatches=8, stages_per_rank=SCHEDULES[name])
    intervals = simulate_time(orders, duration)
    ends: dict[tuple[bool, int, int], float] = {}
    for rank, order in orders.items():
        assert [i.begin for i in intervals[rank]] == sorted(i.begin for i in intervals[rank])
        for step, interval in zip(order, intervals[rank], strict=True):
            assert interval.end - interval.begin >= sum(map(duration, step.members))
            for member in step.members:
                if member.kind is not Kind.BACKWARD_WEIGHT:
                    ends[member.kind is Kind.FORWARD, *member.key] = interval.end
    last = max(stage for _, stage, _ in ends)
    for rank, order in orders.items():
        for step, interval in zip(order, intervals[rank], strict=True):
            for member in step.members:
                forward = member.kind is Kind.FORWARD
                source = member.stage + (-1 if forward else 1)
                if member.kind is not Kind.BACKWARD_WEIGHT and 0 <= source <= last:
                    assert ends[forward, source, member.microbatch] <= interval.end


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    orders = {
        0: tuple(lowered.step for lowered in parse_plan("0F0 0B0 0F1 0B1")),
        1: tuple(lowered.step for lowered in parse_plan("1F1 1F0 1B1 1B0")),
    }
    with pytest.raises(RejectedError) as caught:
        simulate_time(orders, duration)
    assert caught.value.reason is Reason.SCHEDULE_DEADLOCK
    assert any("<-- here" in line for line in caught.value.trace)
