# SPDX-License-Identifier: Apache-2.0
"""Lowering of small orders, written out, and every rule that validation enforces."""

from __future__ import annotations

import pytest

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import ComputeOrder, format_plan, parse_plan
from activation_swap.core.schedule.decision import decide
from activation_swap.core.schedule.liveness import find_chunks, find_order_problem
from activation_swap.core.schedule.lowering import lower, plan_rank
from activation_swap.core.schedule.orders import gpipe_order, one_f_one_b_order
from activation_swap.core.schedule.simulation import in_flight, residency
from activation_swap.core.schedule.validation import validate
from activation_swap.errors import Reason, RejectedError

pytestmark = pytest.mark.unit


def order_of(text: str) -> ComputeOrder:
    return tuple(lowered.step for lowered in parse_plan(text))


@pytest.mark.parametrize(
    ("order", "plan"),
    [
        pytest.param(
            "1F0 1B0",
            "1SET_GROUP0:TAIL 1F0 1OFFLOAD0 1WAIT_OFFLOAD0 1B0",
            id="backward follows at once",
        ),
        pytest.param(
            "1F0 1F1 1B0 1B1",
            "1SET_GROUP0:TAIL 1F0 1OFFLOAD0 1SET_GROUP1:TAIL 1F1 1OFFLOAD1 1WAIT_OFFLOAD0 "
            "1B0 1WAIT_OFFLOAD1 1B1",
            id="one step between: too short to come back",
        ),
        pytest.param(
            "0F0 0F1 0F2 0B0 0B1 0B2",
            "0SET_GROUP0 0F0 0OFFLOAD0 0SET_GROUP1 0F1 0OFFLOAD1 0WAIT_OFFLOAD0 "
            "0RELOAD0 0SET_GROUP2 0F2 0OFFLOAD2 0WAIT_OFFLOAD1 "
            "0RELOAD1 0WAIT_RELOAD0 0B0 0WAIT_OFFLOAD2 0RELOAD2 0WAIT_RELOAD1 0B1 "
            "0WAIT_RELOAD2 0B2",
            id="two steps between: away and back",
        ),
    ],
)
def test_lowering(order: str, plan: str) -> None:
    lowered = plan_rank(order_of(order), attentions={0: 8, 1: 8})
    assert format_plan(lowered) == plan
    validate(lowered)


@pytest.mark.parametrize(
    ("stage", "deferred", "first_use", "last_use"),
    [
        pytest.param(1, (), 1, 3, id="I needs all, W needs some again"),
        pytest.param(0, (), 3, 3, id="I of the first stage runs nothing"),
        pytest.param(1, (1,), 1, 1, id="a dw_builder runs all in I"),
        pytest.param(0, (0,), 1, 1, id="a dw_builder on the first stage"),
    ],
)
def test_split_backward(
    stage: int, deferred: tuple[int, ...], first_use: int, last_use: int
) -> None:
    order = order_of(f"{stage}F0 {stage}I0 {stage}F1 {stage}W0 {stage}B1")
    chunk = find_chunks(order, deferred_weight_stages=deferred)[0]
    assert (chunk.forward, chunk.first_use, chunk.last_use) == (0, first_use, last_use)


@pytest.mark.parametrize(
    ("order", "step", "part"),
    [
        ("0B0", 0, "0B0 where F of this chunk could follow"),
        ("0F0 0F0", 1, "0F0 where B or I of this chunk could follow"),
        ("0F0 0W0", 1, "0W0"),
        ("0F0 0B0 0W0", 2, "0W0 where nothing more"),
        ("0F0 0I0 0B0", 2, "0B0 where W"),
        ("0F0 0F1 0B0", 1, "0F1 without the backward that must follow"),
        ("0F0 0I0", 1, "0I0 without the backward that must follow"),
        ("(0F0;0B0)OVERLAP_F_B", 0, "0B0 overlaps an earlier action of its own chunk"),
    ],
)
def test_an_order_that_no_step_could_have(order: str, step: int, part: str) -> None:
    problem = find_order_problem(order_of(order))
    assert problem is not None
    assert problem.step == step
    assert part in problem.text
    with pytest.raises(RejectedError) as caught:
        find_chunks(order_of(order))
    assert caught.value.reason is Reason.SCHEDULE_ORDER
    assert any("<-- here" in line for line in caught.value.trace)


GOOD = (
    "0SET_GROUP0 0F0 0OFFLOAD0 0SET_GROUP1:TAIL 0F1 0OFFLOAD1 0WAIT_OFFLOAD0 0WAIT_OFFLOAD1 0B1 "
    "0RELOAD0 0SET_GROUP2:ALL 0F2 0WAIT_RELOAD0 0B0 0B2"
)


def test_the_plan_that_the_next_test_breaks_is_good() -> None:
    validate(parse_plan(GOOD))


@pytest.mark.parametrize(
    ("good", "bad", "step", "part"),
    [
        ("0SET_GROUP2:ALL ", "", 3, "no SET_GROUP before the forward of stage 0, microbatch 2"),
        ("0SET_GROUP0 ", "", 0, "0OFFLOAD0 where SET_GROUP"),
        ("0OFFLOAD0 ", "", 1, "0WAIT_OFFLOAD0 where OFFLOAD"),
        ("0WAIT_OFFLOAD0 ", "", 3, "0RELOAD0 where WAIT_OFFLOAD"),
        ("0RELOAD0 ", "", 4, "0WAIT_RELOAD0 where RELOAD"),
        ("0WAIT_RELOAD0 ", "", 3, "0RELOAD0 is not followed by WAIT_RELOAD"),
        ("0WAIT_RELOAD0 0B0 0B2", "0B0 0WAIT_RELOAD0 0B2", 5, "after the first use"),
        ("0OFFLOAD0", "0OFFLOAD0 0OFFLOAD0", 0, "0OFFLOAD0 where WAIT_OFFLOAD"),
        ("0RELOAD0", "0RELOAD0 0RELOAD0", 3, "0RELOAD0 where WAIT_RELOAD"),
        ("0B0 0B2", "0B0 0RELOAD0 0B2", 5, "0RELOAD0 after WAIT_RELOAD ended"),
        ("0SET_GROUP2:ALL 0F2", "0SET_GROUP2:ALL 0F2 0OFFLOAD2", 3, "0OFFLOAD2 after SET_GROUP"),
        (
            "0F0 0OFFLOAD0 0SET_GROUP1:TAIL 0F1",
            "0F0 0SET_GROUP1:TAIL 0F1 0OFFLOAD0",
            1,
            "right after",
        ),
        (
            "0SET_GROUP2:ALL 0F2 0WAIT_RELOAD0",
            "0F2 0SET_GROUP2:ALL 0WAIT_RELOAD0",
            4,
            "right before",
        ),
        ("0F2 ", "0F2 7OFFLOAD0 ", 3, "7OFFLOAD0 of a chunk that is never computed"),
    ],
)
def test_every_rule_of_a_plan(good: str, bad: str, step: int, part: str) -> None:
    assert GOOD.count(good) == 1
    with pytest.raises(RejectedError) as caught:
        validate(parse_plan(GOOD.replace(good, bad)), rank=3)
    error = caught.value
    assert error.reason is Reason.SCHEDULE_PLAN
    assert part in error.found
    assert error.where == f"rank 3, step {step}"
    marked = [line for line in error.trace if line.endswith("<-- here")]
    assert len(marked) == 1
    assert marked[0].startswith(f"step {step}:")


def test_a_reload_between_the_halves_of_a_backward_is_late_where_the_first_runs_all() -> None:
    plan = parse_plan("0SET_GROUP0 0F0 0OFFLOAD0 0WAIT_OFFLOAD0 0I0 0RELOAD0 0WAIT_RELOAD0 0W0")
    validate(plan)

    with pytest.raises(RejectedError) as caught:
        validate(plan, deferred_weight_stages={0})

    assert caught.value.found == "0RELOAD0 comes after the first use of stage 0, microbatch 0"
    assert caught.value.where == "rank 0, step 2"


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        (1, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        (2, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
    ],
)
def test_1f1b(stage: int, expected: str) -> None:
    assert one_f_one_b_order(stage=stage, stages=3, microbatches=4) == order_of(expected)


def test_gpipe() -> None:
    assert gpipe_order(stage=2, microbatches=2) == order_of("2F0 2F1 2B0 2B1")


@pytest.mark.parametrize(
    ("stage", "without", "planned"),
    [(0, 4 * 24, 4), (1, 3 * 24, 4), (2, 2 * 24, 3), (3, 24, 2)],
)
def test_1f1b_peak_by_rank(stage: int, without: int, planned: int) -> None:
    """Four ranks of 24 layers: a chunk in flight costs 24 groups without a swap."""
    order = one_f_one_b_order(stage=stage, stages=4, microbatches=8)
    assert peaks(order, attentions={stage: 24}) == (without, planned)


def peaks(order: ComputeOrder, *, attentions: dict[int, int]) -> tuple[int, int]:
    chunks = find_chunks(order)
    keeps = decide(chunks, attentions=attentions, steps=len(order))
    without = max(in_flight(chunks, weights=attentions, steps=len(order)))
    return without, max(residency(chunks, keeps, attentions=attentions, steps=len(order)))


def test_no_traffic_where_the_peak_does_not_fall() -> None:
    """One attention per stage and a backward that follows at once: nothing could be given up."""
    order = one_f_one_b_order(stage=3, stages=4, microbatches=8)
    plan = plan_rank(order, attentions={3: 1})
    assert {action.keep for lowered in plan for action in lowered.before} == {Keep.ALL}
    assert not any(lowered.after for lowered in plan)
    chunks = find_chunks(order)
    assert lower(order, chunks, {chunk.key: Keep.ALL for chunk in chunks}) == plan
