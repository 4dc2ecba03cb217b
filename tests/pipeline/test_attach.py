"""Attached to every schedule of torch in real processes: the schedule runs as before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from activation_swap.core.schedule.actions import Kind, format_plan, parse_plan
from activation_swap.core.schedule.torch_pipelining import attach
from activation_swap.core.site import Site
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny_pipeline import Pipeline, recorded_calls
from tests.schedule.fake_world import SCHEDULES
from tests.schedule.recording_verbs import RecordingVerbs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.level0

LAYERS = 2
WORLDS = {2: 4, 4: 8}
"""Microbatches by number of ranks."""


@dataclass
class Attached:
    """What one rank saw."""

    calls: list[str]
    calls_attached: list[str]
    plan: str
    swap_actions: list[str]
    aborts: int


def sites_of(pipeline: Pipeline) -> tuple[Site, ...]:
    return tuple(
        Site(fqn=f"{index}.{name}", module=module)
        for index, stage in enumerate(pipeline.modules)
        for name, module in stage.named_modules()
        if name.endswith("self_attn")
    )


def run_every_schedule(size: int) -> dict[str, Attached]:
    results = {}
    with recorded_calls() as log:
        for name in SCHEDULES:
            pipeline = Pipeline(name, microbatches=WORLDS[size], layers_per_stage=LAYERS, log=log)
            plain = pipeline.step(1, sequence=8)
            verbs = RecordingVerbs()
            attachment = attach(pipeline.schedule, verbs, sites=sites_of(pipeline))
            attached = pipeline.step(1, sequence=8)
            assert attachment.plan is not None
            results[name] = Attached(
                plain.calls, attached.calls, format_plan(attachment.plan), verbs.log, verbs.aborts
            )
    return results


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def by_rank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Attached]]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(
        partial(run_every_schedule, request.param), size=request.param, directory=directory
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_runs_the_plan_and_sees_nothing_of_it(
    name: str, by_rank: list[dict[str, Attached]]
) -> None:
    for rank in by_rank:
        seen = rank[name]
        assert seen.calls_attached == seen.calls
        planned, ran = swap_actions(seen.plan), seen.swap_actions
        if "OVERLAP_F_B" in seen.plan:
            # The members of an overlapped step come in any order, each with its own actions.
            planned, ran = sorted(planned), sorted(ran)
        assert ran == planned
        assert seen.aborts == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_is_of_the_order_that_ran(name: str, by_rank: list[dict[str, Attached]]) -> None:
    kinds = {
        "forward_one_chunk": Kind.FORWARD,
        "backward_one_chunk": Kind.FULL_BACKWARD,
        "backward_weight_one_chunk": Kind.BACKWARD_WEIGHT,
    }
    for rank in by_rank:
        ran = []
        for call in rank[name].calls:
            method, _, rest = call.partition("(")
            if method in kinds:
                stage, microbatch, *split = rest.rstrip(")").split(", ")
                kind = Kind.BACKWARD_INPUT if split else kinds[method]
                ran.append(f"{stage}{kind}{microbatch}")
        planned = [
            str(member)
            for lowered in parse_plan(rank[name].plan)
            for member in lowered.step.members
        ]
        assert planned == ran


def swap_actions(plan: str) -> list[str]:
    return [
        str(action) for lowered in parse_plan(plan) for action in (*lowered.before, *lowered.after)
    ]
