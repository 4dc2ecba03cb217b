# SPDX-License-Identifier: Apache-2.0
"""Text form of the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import (
    Action,
    Kind,
    LoweredStep,
    Step,
    format_plan,
    parse_plan,
)
from activation_swap.errors import Reason, RejectedError

pytestmark = pytest.mark.unit

COMPUTE = (Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
indices = st.integers(min_value=0, max_value=999)
nothing = st.just(Keep.NOTHING)


def compute_actions() -> st.SearchStrategy[Action]:
    return st.builds(Action, indices, st.sampled_from(COMPUTE), indices, nothing)


def steps() -> st.SearchStrategy[Step]:
    return st.builds(lambda members: Step(tuple(members)), st.lists(compute_actions(), min_size=1))


def to_torch(step: Step) -> torch_schedules._Action:
    members = tuple(
        torch_schedules._Action(
            member.stage,
            torch_schedules._ComputationType.from_str(member.kind.value),
            member.microbatch,
        )
        for member in step.members
    )
    if len(members) == 1:
        return members[0]
    overlap = torch_schedules._ComputationType.OVERLAP_F_B
    return torch_schedules._Action(-1, overlap, None, members)


@given(steps())
def test_a_compute_step_has_the_text_of_torch_and_parses_back(step: Step) -> None:
    assert str(step) == repr(to_torch(step))
    assert Step.parse(str(step)) == step
    assert to_torch(Step.parse(str(step))) == torch_schedules._Action.from_str(str(step))


@given(st.sampled_from(Kind), st.sampled_from(Keep), indices, indices)
def test_a_swap_action_parses_back(kind: Kind, keep: Keep, stage: int, microbatch: int) -> None:
    keep = keep if kind is Kind.SET_GROUP else Keep.NOTHING
    action = Action(stage, kind, microbatch, keep)
    assert Action.parse(str(action)) == action


def swap_actions(*kinds: Kind) -> st.SearchStrategy[tuple[Action, ...]]:
    one = st.builds(Action, indices, st.sampled_from(kinds), indices, nothing)
    return st.lists(one, max_size=3).map(tuple)


lowered_steps = st.builds(
    LoweredStep,
    swap_actions(Kind.SET_GROUP, Kind.RELOAD, Kind.WAIT_RELOAD),
    steps(),
    swap_actions(Kind.OFFLOAD, Kind.WAIT_OFFLOAD),
)


@given(st.lists(lowered_steps).map(tuple))
def test_a_plan_parses_back(plan: tuple[LoweredStep, ...]) -> None:
    assert parse_plan(format_plan(plan)) == plan


def test_a_plan_is_readable() -> None:
    text = "1SET_GROUP0:TAIL 1F0 1OFFLOAD0 1WAIT_OFFLOAD0 (1F1;2B0)OVERLAP_F_B"
    first, second = parse_plan(text)
    assert first.before == (Action(1, Kind.SET_GROUP, 0, Keep.TAIL),)
    assert [action.kind for action in first.after] == [Kind.OFFLOAD, Kind.WAIT_OFFLOAD]
    assert second.step.members == (Action(1, Kind.FORWARD, 1), Action(2, Kind.FULL_BACKWARD, 0))


@pytest.mark.parametrize(
    "text",
    [
        "F0",
        "1F",
        "1X0",
        "1F0:TAIL",
        "1SET_GROUP0:tail",
        "(1F0;2B0",
        "(1F0;2OFFLOAD0)OVERLAP_F_B",
        "1OFFLOAD0 1F0",
        "1F0 1RELOAD0",
        "1F0 1RELOAD0 1OFFLOAD0 1B0",
        "-1F0",
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(RejectedError) as caught:
        parse_plan(text)
    assert caught.value.reason is Reason.SCHEDULE_TEXT
