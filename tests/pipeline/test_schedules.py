# SPDX-License-Identifier: Apache-2.0
"""Every schedule of torch with real models and processes: the bits of the run without a swap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy, TrainingSetup, registry
from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Kind
from activation_swap.core.schedule.liveness import find_chunks
from activation_swap.core.schedule.simulation import residency
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny_pipeline import Pipeline, recorded_calls
from tests.schedule.fake_world import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

    from activation_swap import Swap, SwapStats
    from activation_swap.core.schedule.actions import LoweredStep

pytestmark = pytest.mark.level0

POLICY = SwapPolicy(min_bytes=2048)
LAYERS = 3
STEPS = 2
WORLDS = {2: 4, 4: 8}
"""Microbatches by number of ranks."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Run:
    """What one rank saw of one schedule. ``equal`` covers calls, sends and receives too."""

    equal: list[bool]
    gradients: int
    losses: int
    stats: SwapStats
    moved_attentions: int
    simulated_peak: int
    link_bytes: int
    device_bytes: int
    planned_order: list[str]
    order: list[str]
    removed_equal: bool
    wrapped_after_remove: bool


def run_schedule(name: str, dtype: torch.dtype, microbatches: int, log: list[str]) -> Run:
    build = partial(
        Pipeline, name, microbatches=microbatches, dtype=dtype, layers_per_stage=LAYERS, log=log
    )
    plain = build()
    expected = [plain.step(seed) for seed in range(STEPS)]
    pipeline = build()
    swap = swapped(pipeline)
    records = [pipeline.step(seed) for seed in range(STEPS)]
    stats = swap.stats()
    stats = replace(stats, kept_bytes=dict(stats.kept_bytes))  # a mapping proxy does not pickle
    plan = attachment_of(swap).plan
    swap.remove()
    after = pipeline.step(0)
    link_bytes, device_bytes = bytes_per_attention(plain)
    return Run(
        equal=[one.equals(other) for one, other in zip(expected, records, strict=True)],
        gradients=len(records[-1].gradients),
        losses=len(records[-1].losses),
        stats=stats,
        moved_attentions=moved_attentions(plan),
        simulated_peak=simulated_peak(plan),
        link_bytes=link_bytes,
        device_bytes=device_bytes,
        planned_order=[str(member) for lowered in plan for member in lowered.step.members],
        order=compute_calls(records[0].calls),
        # Before 2.12 the first step of all also opens the connections: compare with a later one.
        removed_equal=replace(expected[0], calls=expected[-1].calls).equals(after),
        wrapped_after_remove=any("forward_one_chunk" in vars(stage) for stage in pipeline.stages),
    )


def swapped(pipeline: Pipeline) -> Swap:
    setup = TrainingSetup(pp_size=2)
    swap = registry.apply("attention", pipeline.modules, setup=setup, policy=POLICY)
    swap.attach(pipeline.schedule)
    return swap


def attachment_of(swap: Swap) -> Any:
    installation: Any = swap._installation
    return installation._attachment


def moved_attentions(plan: tuple[LoweredStep, ...]) -> int:
    staying = {Keep.NOTHING: 0, Keep.TAIL: 1, Keep.ALL: LAYERS}
    return sum(
        LAYERS - staying[action.keep]
        for lowered in plan
        for action in lowered.before
        if action.kind is Kind.SET_GROUP
    )


def simulated_peak(plan: tuple[LoweredStep, ...]) -> int:
    order = [lowered.step for lowered in plan]
    chunks = find_chunks(order)
    keeps = {
        action.key: action.keep
        for lowered in plan
        for action in lowered.before
        if action.kind is Kind.SET_GROUP
    }
    attentions = {chunk.key.stage: LAYERS for chunk in chunks}
    return max(residency(chunks, keeps, attentions=attentions, steps=len(order)))


def bytes_per_attention(pipeline: Pipeline) -> tuple[int, int]:
    """Let the policy select from one chunk: bytes over the link, and bytes on the device."""
    setup = TrainingSetup(pp_size=2)
    swap = registry.apply("attention", pipeline.modules[0], setup=setup, policy=POLICY)
    stage = pipeline.stages[0].submod
    tokens = torch.zeros((1, 64), dtype=torch.long)
    weight = next(stage.parameters())
    hidden = torch.zeros((1, 64, 64), dtype=weight.dtype, requires_grad=True)
    outputs = []
    for microbatch, keep in enumerate((Keep.NOTHING, Keep.ALL)):
        swap.groups.set_group((0, microbatch), keep=keep)
        outputs.append(stage(tokens if pipeline.stages[0].is_first else hidden))
        swap.groups.set_group(None)
        if keep is Keep.NOTHING:
            swap.groups.launch_offload((0, microbatch))
            swap.groups.wait_offload((0, microbatch))
    stats = swap.stats()
    swap.remove()
    assert stats.offloaded_bytes % LAYERS == stats.resident_bytes % LAYERS == 0
    return stats.offloaded_bytes // LAYERS, stats.resident_bytes // LAYERS


def compute_calls(calls: list[str]) -> list[str]:
    """Write the recorded calls of compute methods as a schedule does."""
    kinds = {
        "forward_one_chunk": Kind.FORWARD,
        "backward_one_chunk": Kind.FULL_BACKWARD,
        "backward_weight_one_chunk": Kind.BACKWARD_WEIGHT,
    }
    order = []
    for call in calls:
        method, _, rest = call.partition("(")
        if method in kinds:
            stage, microbatch, *split = rest.rstrip(")").split(", ")
            order.append(f"{stage}{Kind.BACKWARD_INPUT if split else kinds[method]}{microbatch}")
    return order


def run_all(size: int) -> dict[tuple[str, str], Run]:

    with recorded_calls() as log:
        return {
            (name, dtype): run_schedule(name, DTYPES[dtype], WORLDS[size], log)
            for name in SCHEDULES
            for dtype in DTYPES
        }


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def by_rank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, str], Run]]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(partial(run_all, request.param), size=request.param, directory=directory)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_bits_bytes_calls_and_peak(
    name: str, dtype: str, by_rank: list[dict[tuple[str, str], Run]]
) -> None:
    runs = [rank[name, dtype] for rank in by_rank]
    for run in runs:
        assert run.equal == [True] * STEPS
        assert run.gradients > 0
        assert run.moved_attentions > 0
        stats = run.stats
        assert stats.offloaded_bytes == STEPS * run.moved_attentions * run.link_bytes
        assert stats.reloaded_bytes == stats.offloaded_bytes
        assert stats.resident_bytes_peak == run.simulated_peak * run.device_bytes
        assert stats.reload_misses == 0
        assert stats.late_releases == 0
        assert stats.live_groups == 0
        assert stats.host_bytes_in_use == 0
        assert stats.resident_bytes == 0
        assert KeepReason.FAILED not in stats.kept_bytes
        assert run.order == run.planned_order
        assert run.removed_equal
        assert not run.wrapped_after_remove
    assert sum(run.losses for run in runs) == max(run.losses for run in runs) > 0
