# SPDX-License-Identifier: Apache-2.0
"""The runner executes a plan around compute, and falls back without one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given

from activation_swap.core.schedule.actions import (
    Action,
    ComputeOrder,
    Kind,
    LoweredStep,
    compute_actions,
    format_plan,
    parse_plan,
)
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.orders import gpipe_order, one_f_one_b_order
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.errors import RejectedError
from tests.schedule.legal_orders import attention_counts, legal_orders
from tests.schedule.recording_verbs import RecordingVerbs

pytestmark = pytest.mark.unit


class Rank:
    """A runner, and compute that writes itself into the log of the verbs."""

    def __init__(self) -> None:
        self.verbs = RecordingVerbs()
        self.runner = ScheduleRunner(self.verbs)

    def compute(self, action: Action) -> None:
        with self.runner.compute(action):
            self.verbs.log.append(str(action))
            if action.kind is Kind.FORWARD:
                assert self.verbs.current == action.key
        assert self.verbs.current is None

    def run_one(self, action: Action) -> None:
        with self.runner.compute(action):
            pass

    def run(self, text: str) -> str:
        for lowered in parse_plan(text):
            for member in lowered.step.members:
                self.compute(member)
        return self.verbs.take()


def planned(order: ComputeOrder) -> tuple[LoweredStep, ...]:
    return plan_rank(order, attentions=dict.fromkeys(range(6), 8))


def text_of(order: ComputeOrder) -> str:
    return " ".join(map(str, order))


@given(legal_orders(), attention_counts())
def test_a_step_in_order_runs_exactly_its_plan(
    order: ComputeOrder, attentions: dict[int, int]
) -> None:
    plan = plan_rank(order, attentions=attentions)
    rank = Rank()
    for _ in range(2):
        rank.runner.begin_step(plan)
        rank.run(text_of(order))
        assert not rank.runner.desynced
    assert rank.verbs.aborts == 2, "one before each step, whatever the last one left"


def test_single_actions_come_in_the_order_of_the_plan() -> None:
    order = one_f_one_b_order(stage=0, stages=4, microbatches=6)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    assert rank.run(text_of(order)) == format_plan(planned(order))


def test_without_a_plan_all_is_offloaded_at_once_and_nothing_reloaded() -> None:
    rank = Rank()
    rank.runner.begin_step(None)
    assert rank.run("0F0 0F1 0B0 0B1 0F2 0B2") == (
        "0SET_GROUP0 0F0 0OFFLOAD0 0SET_GROUP1 0F1 0OFFLOAD1 0WAIT_OFFLOAD0 "
        "0B0 0WAIT_OFFLOAD1 0B1 0SET_GROUP2 0F2 0OFFLOAD2 0WAIT_OFFLOAD2 0B2"
    )


def test_a_step_without_a_plan_is_recorded() -> None:
    rank = Rank()
    order = "0F0 0F1 0B0 0I1 0W1"
    rank.runner.begin_step(None)
    rank.run("0F0 0F1 0B0 0I1")
    assert rank.runner.recorded is None
    rank.run("0W1")
    recorded = rank.runner.recorded
    assert recorded is not None
    assert text_of(recorded) == order


def test_passive_steps_name_no_group() -> None:
    rank = Rank()
    rank.runner.begin_passive()
    action = Action(0, Kind.FORWARD, 0)
    with rank.runner.compute(action):
        assert rank.verbs.current is None
    assert rank.verbs.log == []
    assert rank.runner.recorded is None


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param("0F0 0F1 0F3", id="a call too early"),
        pytest.param("0F0 0F1 0F2 0B1", id="another chunk"),
        pytest.param("0F0 0F0", id="a call twice"),
        pytest.param("0F0 5F0", id="a chunk that is not in the plan"),
        pytest.param(text_of(gpipe_order(stage=0, microbatches=4)) + " 0F0", id="after the end"),
    ],
)
def test_an_unexpected_call_ends_the_plan_of_this_step(
    calls: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = gpipe_order(stage=0, microbatches=4)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    log = rank.run(calls)
    assert rank.runner.desynced
    assert len(caplog.records) == 1
    assert calls.rsplit(maxsplit=1)[-1] in log.split()
    rank.runner.begin_step(planned(order))
    assert rank.run(text_of(order)) == format_plan(planned(order))
    assert not rank.runner.desynced


def test_what_was_launched_before_a_desync_is_waited_for() -> None:
    """Order of GPipe over four; after the desync no launch of the plan lacks its wait."""
    rank = Rank()
    rank.runner.begin_step(planned(gpipe_order(stage=0, microbatches=3)))
    log = rank.run("0F0 0F1 0F2 0B1 0B0 0B2").split()
    assert rank.runner.desynced
    for microbatch in range(3):
        assert log.count(f"0OFFLOAD{microbatch}") == 1
        assert log.count(f"0WAIT_OFFLOAD{microbatch}") == 1
        assert log.count(f"0RELOAD{microbatch}") == log.count(f"0WAIT_RELOAD{microbatch}")
    assert log.index("0WAIT_RELOAD0") < log.index("0B0")


@pytest.mark.parametrize(
    "calls", ["0F0 0F1 0F2 0F0 0B0 0B1 0B2", "0F0 0F1 0F2 0B0 0F1 0B1 0B2", "0F0 0F1 0F1 0B0 0B1"]
)
def test_a_chunk_that_is_computed_again_is_another_one(calls: str) -> None:
    """What was launched of the first is waited for by nobody: no verb comes out of order."""
    rank = Rank()
    rank.runner.begin_step(planned(gpipe_order(stage=0, microbatches=3)))
    log = rank.run(calls).split()
    legal = ["SET_GROUP", "OFFLOAD", "WAIT_OFFLOAD", "RELOAD", "WAIT_RELOAD"]
    state: dict[int, int] = {}
    for action in map(Action.parse, log):
        if action.kind in legal:
            verb = legal.index(action.kind)
            assert verb == 0 or verb == state[action.microbatch] + 1, log
            state[action.microbatch] = verb


def test_a_forward_without_grad_is_passed_by() -> None:
    order = gpipe_order(stage=0, microbatches=2)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    log = rank.run("0F0")
    with torch.no_grad(), rank.runner.compute(Action(0, Kind.FORWARD, 0)):
        assert rank.verbs.current is None
    log += " " + rank.run("0F1 0B0 0B1")
    assert log == format_plan(planned(order))
    assert not rank.runner.desynced


def test_a_kind_may_be_its_letter() -> None:
    order = gpipe_order(stage=0, microbatches=2)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    with rank.runner.compute(Action(0, "F", 0)):  # type: ignore[arg-type]
        assert rank.verbs.current == (0, 0)
    assert rank.verbs.current is None


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda rank: rank.run_one(Action(0, Kind.OFFLOAD, 0)), "0OFFLOAD0"),
        (lambda rank: rank.runner.begin_step(gpipe_order(stage=0, microbatches=1)), "Step 0F0"),
        (lambda _: plan_rank(gpipe_order(stage=1, microbatches=1), attentions={}), "[1] = None"),
        (lambda _: plan_rank(gpipe_order(stage=0, microbatches=1), attentions={0: -1}), "= -1"),
        (lambda _: one_f_one_b_order(stage=5, stages=4, microbatches=3), "stage 5 of 4"),
        (lambda _: gpipe_order(stage=0, microbatches=0), "0 microbatches"),
    ],
)
def test_arguments_that_would_plan_or_move_something_else(call: Any, found: str) -> None:
    rank = Rank()
    rank.runner.begin_step(None)
    with pytest.raises(RejectedError, match="AS514") as caught:
        call(rank)
    assert found in caught.value.found


@pytest.mark.parametrize("failing", ["0F1", "0B0"])
def test_a_failed_step_is_forgotten_and_the_next_is_right(failing: str) -> None:
    order = gpipe_order(stage=0, microbatches=3)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    for _, action in compute_actions(order):
        if str(action) == failing:
            with pytest.raises(MemoryError), rank.runner.compute(action):
                raise MemoryError
            break
        rank.compute(action)
    assert rank.verbs.current is None
    assert rank.verbs.aborts == 2
    rank.verbs.take()
    rank.runner.begin_step(planned(order))
    assert rank.run(text_of(order)) == format_plan(planned(order))


def test_a_step_that_never_ended_is_forgotten() -> None:
    order = gpipe_order(stage=0, microbatches=3)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    rank.run("0F0 0F1")
    rank.runner.begin_step(planned(order))
    assert rank.verbs.aborts == 2
    assert rank.run(text_of(order)) == format_plan(planned(order))


def test_an_interrupt_behind_the_first_verb_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is named then, and the runner has not noted it yet."""
    order = gpipe_order(stage=0, microbatches=2)
    rank = Rank()
    rank.runner.begin_step(planned(order))
    with monkeypatch.context() as patch:
        set_group = rank.verbs.set_group

        def interrupted(key: tuple[int, int] | None, **options: Any) -> None:
            set_group(key, **options)
            if key is not None:
                raise KeyboardInterrupt

        patch.setattr(rank.verbs, "set_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.run("0F0")
    assert rank.verbs.current is None
    assert rank.verbs.aborts == 2
    rank.verbs.take()
    rank.runner.begin_step(planned(order))
    assert rank.run(text_of(order)) == format_plan(planned(order))


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_an_overlapped_step_runs_on_two_threads(first: str) -> None:
    """Each chunk's own actions run on its thread; the step's other actions run once."""
    order = tuple(
        lowered.step for lowered in parse_plan("0F0 0F1 0F2 (0F3;1B9)OVERLAP_F_B 0B0 0B1 0B2 0B3")
    )
    order = (*parse_steps("1F9"), *order)
    plan = planned(order)
    rank = Rank()
    rank.runner.begin_step(plan)
    rank.run("1F9 0F0 0F1 0F2")
    forward, backward = Action(0, Kind.FORWARD, 3), Action(1, Kind.FULL_BACKWARD, 9)
    entered = {forward: threading.Event(), backward: threading.Event()}
    order_of_entry = [forward, backward] if first == "forward" else [backward, forward]
    groups: dict[Action, tuple[int, int] | None] = {}

    def member(action: Action) -> None:
        if action is order_of_entry[1]:
            assert entered[order_of_entry[0]].wait(5)
        with rank.runner.compute(action):
            entered[action].set()
            assert entered[order_of_entry[1]].wait(5)
            groups[action] = rank.verbs.current

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, order_of_entry))
    assert not rank.runner.desynced
    assert groups == {forward: (0, 3), backward: None}
    ran = sorted(rank.verbs.take().split())
    lowered = next(item for item in plan if len(item.step.members) == 2)
    assert ran == sorted(map(str, (*lowered.before, *lowered.after)))
    rank.run("0B0 0B1 0B2 0B3")
    assert not rank.runner.desynced


def parse_steps(text: str) -> ComputeOrder:
    return tuple(lowered.step for lowered in parse_plan(text))
