# SPDX-License-Identifier: Apache-2.0
"""``Swap.attach`` in one process: what it replaces, what it counts, when it plans, what it says."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.core.schedule import torch_pipelining
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.orders import gpipe_order
from activation_swap.core.schedule.torch_orders import read_order
from activation_swap.errors import ActivationSwapError, Reason
from tests.pipeline.tiny_pipeline import Pipeline, loss_of
from tests.schedule.fake_world import fake_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from activation_swap import Swap

pytestmark = pytest.mark.level0

POLICY = SwapPolicy(min_bytes=2048)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    """One rank: every stage is here, and no schedule communicates."""
    torch.set_num_threads(1)
    with fake_world(0, 1):
        yield


def applied(pipeline: Pipeline, policy: SwapPolicy = POLICY) -> Swap:
    return registry.apply(
        "attention", pipeline.modules, setup=TrainingSetup(pp_size=2), policy=policy
    )


def wrapped(pipeline: Pipeline) -> list[str]:
    return [name for stage in pipeline.stages for name in vars(stage) if name.endswith("_chunk")]


def attachment_of(swap: Swap) -> Any:
    installation: Any = swap._installation
    return installation._attachment


def test_a_second_schedule_takes_the_place_of_the_first() -> None:
    plain, pipeline = (Pipeline("GPipe", microbatches=4, layers_per_stage=3) for _ in range(2))
    swap = applied(pipeline)
    for kind, microbatches in ((ScheduleGPipe, 4), (Schedule1F1B, 2), (ScheduleGPipe, 3)):
        for run in (plain, pipeline):
            run.microbatches = microbatches
            run.schedule = kind(run.stages[0], n_microbatches=microbatches, loss_fn=loss_of)
        swap.attach(pipeline.schedule)
        swap.attach(pipeline.schedule)
        assert repr(swap) == "Swap(active=True, attentions=3, attached=True)"
        swap.reset_stats()
        assert plain.step(0).equals(pipeline.step(0))
        assert swap.stats().offloaded_bytes > 0
        assert swap.stats().reload_misses == 0
        assert len(attachment_of(swap).plan) == 2 * microbatches
    swap.remove()
    assert not wrapped(pipeline)
    again = applied(pipeline)
    again.attach(pipeline.schedule)
    again.remove()
    assert not wrapped(pipeline)


def test_a_refused_schedule_leaves_the_first_in_its_place() -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    first = attachment_of(swap)
    with pytest.raises(ActivationSwapError) as caught:
        swap.attach(object())
    assert caught.value.reason is Reason.NOT_A_SCHEDULE
    assert attachment_of(swap) is first
    assert wrapped(pipeline)


def test_wrappers_that_others_wrapped_drive_nothing_after_remove() -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    stage: Any = pipeline.stages[0]
    for name in ("clear_runtime_states", "forward_one_chunk", "backward_one_chunk"):
        inner = getattr(stage, name)
        setattr(stage, name, lambda *args, call=inner, **options: call(*args, **options))
    attachment = attachment_of(swap)
    swap.remove()
    pipeline.step(0)
    assert attachment._runner._mode.name == "PASSIVE"


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B"])
def test_an_attached_model_dies_with_its_last_reference(name: str) -> None:
    pipeline = Pipeline(name, microbatches=4, layers_per_stage=3)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    pipeline.step(0)
    assert swap.stats().offloaded_bytes > 0
    gc.collect()
    gc.disable()
    try:
        model, schedule = ref(pipeline.modules[-1]), ref(pipeline.schedule)
        del pipeline
        assert schedule() is None
        assert model() is None
    finally:
        gc.enable()
    swap.remove()


def test_stages_in_a_schedule_that_was_never_attached_are_followed() -> None:
    plain, pipeline = (Pipeline("GPipe", microbatches=4, layers_per_stage=3) for _ in range(2))
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    for run in (plain, pipeline):
        run.schedule = ScheduleGPipe(run.stages[0], n_microbatches=3, loss_fn=loss_of)
        run.microbatches = 3
    misses = []
    for seed in range(3):
        swap.reset_stats()
        assert plain.step(seed).equals(pipeline.step(seed))
        assert swap.stats().offloaded_bytes > 0
        misses.append(swap.stats().reload_misses)
    assert misses[-1] == 0


def test_only_attentions_that_move_count_in_the_plan() -> None:
    plain, pipeline = (Pipeline("GPipe", microbatches=4, layers_per_stage=4) for _ in range(2))
    swap = applied(pipeline, SwapPolicy(min_bytes=2048, fraction=0.25))
    swap.attach(pipeline.schedule)
    assert plain.step(0).equals(pipeline.step(0))
    order = gpipe_order(stage=0, microbatches=4)
    assert attachment_of(swap).plan == plan_rank(order, attentions={0: 1})
    assert attachment_of(swap).plan != plan_rank(order, attentions={0: 4})
    assert swap.stats().offloaded_bytes > 0


def test_an_order_is_planned_once_until_another_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=read_order)
    monkeypatch.setattr(torch_pipelining, "read_order", read)
    pipeline = Pipeline("Interleaved1F1B", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    for seed in range(3):
        pipeline.step(seed)
    assert read.call_count == 1
    other = ScheduleLoopedBFS([*pipeline.stages], n_microbatches=4, loss_fn=loss_of)
    pipeline.schedule.pipeline_order_with_comms = other.pipeline_order_with_comms
    swap.reset_stats()
    for seed in range(2):
        pipeline.step(seed)
    assert read.call_count == 2
    assert swap.stats().reload_misses == 0


@pytest.mark.parametrize("first", [0, 1])
def test_whichever_stage_is_cleared_first_begins_the_step(first: int) -> None:
    """A schedule over some of the stages may leave out any of them."""
    pipeline = Pipeline("Interleaved1F1B", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    pipeline.stages[first].clear_runtime_states()
    assert attachment_of(swap)._runner._mode.name == "PLANNED"


@pytest.mark.parametrize(
    "name",
    [
        "clear_runtime_states",
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
    ],
)
def test_a_wrapper_that_outlives_its_stage_says_so(name: str) -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    call = getattr(pipeline.stages[0], name)
    del pipeline
    gc.collect()
    with pytest.raises(ReferenceError, match=f"the stage of this {name} is gone"):
        call(*([0] if name.endswith("_chunk") else []))


class OwnLoop(ScheduleInterleaved1F1B):
    """Runs another order than the one it lists."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        listed = self.pipeline_order_with_comms
        other = ScheduleLoopedBFS(self._stages, self._n_microbatches, loss_fn=loss_of)
        self.pipeline_order_with_comms = other.pipeline_order_with_comms
        try:
            return super()._step_microbatches(*args, **kwargs)
        finally:
            self.pipeline_order_with_comms = listed


def test_a_schedule_that_leaves_its_plan_is_learned_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, pipeline = (
        Pipeline("Interleaved1F1B", microbatches=4, schedule_class=OwnLoop) for _ in range(2)
    )
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    misses = []
    for seed in range(4):
        swap.reset_stats()
        assert plain.step(seed).equals(pipeline.step(seed))
        misses.append(swap.stats().reload_misses)
    assert misses[0] > 0
    assert misses[1] > 0
    assert misses[2:] == [0, 0]
    assert swap.stats().offloaded_bytes > 0
    assert len(caplog.records) == 1


def test_a_schedule_that_never_ends_a_chunk_keeps_the_plan_that_it_lists() -> None:
    """Its own calls are no order of a training step, and so teach nothing."""
    pipeline = Pipeline("GPipe", microbatches=4, layers_per_stage=3)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    stage: Any = pipeline.stages[0]
    backward = stage.backward_one_chunk
    stage.backward_one_chunk = lambda chunk, *args, **kwargs: (
        None if chunk == 2 else backward(chunk, *args, **kwargs)
    )
    misses = []
    for seed in range(4):
        swap.reset_stats()
        pipeline.step(seed)
        misses.append(swap.stats().reload_misses)
    assert misses[2] == misses[3] == misses[0] < misses[1]


def test_a_monitor_without_grad_does_not_end_the_plan() -> None:
    """A stage that is run once more in the middle of a step, to look at its output."""
    plain, pipeline = (Pipeline("GPipe", microbatches=4, layers_per_stage=3) for _ in range(2))
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    for one in (plain, pipeline):
        watch(one)
    for seed in range(2):
        assert plain.step(seed).equals(pipeline.step(seed))
    assert swap.stats().reload_misses == 0
    assert swap.stats().offloaded_bytes > 0


def watch(pipeline: Pipeline) -> None:
    stage: Any = pipeline.stages[0]
    backward = stage.backward_one_chunk

    def look_then_go(*args: Any, **kwargs: Any) -> Any:
        kept = dict(stage.fwd_cache), list(stage.output_chunks)
        with torch.no_grad():
            stage.forward_one_chunk(1, (pipeline._tokens(0, 64)[1:2],))
        stage.fwd_cache.clear()
        stage.fwd_cache.update(kept[0])
        stage.output_chunks[:] = kept[1]
        return backward(*args, **kwargs)

    stage.backward_one_chunk = look_then_go


class UnknownLoop(Schedule1F1B):
    """A schedule whose order cannot be read."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        return super()._step_microbatches(*args, **kwargs)


def test_an_evaluation_between_two_steps_forgets_nothing() -> None:
    pipeline = Pipeline("1F1B", microbatches=4, layers_per_stage=3, schedule_class=UnknownLoop)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    pipeline.step(0)
    assert swap.stats().reload_misses > 0
    pipeline.evaluate(1)
    swap.reset_stats()
    pipeline.step(2)
    assert swap.stats().reload_misses == 0


def test_a_failed_step_keeps_the_plan() -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    calls = 0

    def fail_in_the_third(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError

    layer: Any = pipeline.modules[0].model.layers[1]
    layer.register_forward_pre_hook(fail_in_the_third)
    with pytest.raises((ArithmeticError, RuntimeError)):
        pipeline.step(0)
    pipeline.schedule._internal_losses.clear()  # torch keeps the losses of a failed step
    swap.reset_stats()
    pipeline.step(1)
    assert swap.stats().offloaded_bytes > 0
    assert swap.stats().reload_misses == 0


def test_a_pipeline_in_which_nothing_moves_says_so_once() -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    swap = applied(pipeline, SwapPolicy())  # everything here is smaller than a mebibyte
    swap.attach(pipeline.schedule)
    with pytest.warns(RuntimeWarning, match=r"moved nothing.*small: \d+") as caught:
        pipeline.step(0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(1)
    assert swap.stats().offloaded_bytes == 0


@pytest.mark.parametrize(("name", "offloaded"), [("1F1B", False), ("GPipe", True)])
def test_what_the_plan_keeps_is_no_reason_to_warn(name: str, offloaded: bool) -> None:  # noqa: FBT001
    """One stage under 1F1B has one chunk in flight, and two layers fill the window of the plan."""
    pipeline = Pipeline(name, microbatches=4)
    swap = applied(pipeline)
    swap.attach(pipeline.schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(0)
    assert (swap.stats().offloaded_bytes > 0) is offloaded
