# SPDX-License-Identifier: Apache-2.0
"""What does not go by the plan on two real ranks: the bits are right all the same."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

from activation_swap import SwapPolicy, TrainingSetup, registry
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny_pipeline import Pipeline, StepRecord, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from activation_swap import Swap

pytestmark = pytest.mark.level0

POLICY = SwapPolicy(min_bytes=2048)
LAYERS = 3


def swapped(pipeline: Pipeline) -> Swap:
    setup = TrainingSetup(pp_size=2)
    swap = registry.apply("attention", pipeline.modules, setup=setup, policy=POLICY)
    swap.attach(pipeline.schedule)
    return swap


def pair(name: str, microbatches: int = 4, **options: Any) -> tuple[Pipeline, Pipeline, Swap]:
    plain, pipeline = (
        Pipeline(name, microbatches=microbatches, layers_per_stage=LAYERS, **options)
        for _ in range(2)
    )
    return plain, pipeline, swapped(pipeline)


def clean(swap: Swap) -> bool:
    stats = swap.stats()
    return stats.live_groups == 0 and stats.host_bytes_in_use == 0 and stats.resident_bytes == 0


class UnknownLoop(Schedule1F1B):
    """A schedule with a loop of its own; what it runs cannot be known beforehand."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        return super()._step_microbatches(*args, **kwargs)


def an_unknown_order_reloads_on_demand_and_is_learned() -> None:
    plain, pipeline, swap = pair("1F1B", schedule_class=UnknownLoop)
    assert plain.step(0).equals(pipeline.step(0))
    stats = swap.stats()
    assert stats.offloaded_bytes > 0
    # One per chunk: the first attention of a backward; the others are one ahead.
    assert stats.reload_misses == 4
    assert clean(swap)
    swap.reset_stats()
    assert plain.step(1).equals(pipeline.step(1))
    assert swap.stats().reload_misses == 0
    assert swap.stats().offloaded_bytes > 0
    swap.remove()


def an_order_from_csv_may_come_after_the_attachment(directory: Path) -> None:
    plain, pipeline, swap = pair("Interleaved1F1B")
    file = directory / f"{dist.get_rank()}.csv"
    plain.schedule._dump_csv(str(file), "compute_comms")
    swap.remove()
    for run in (plain, pipeline):
        run.schedule = _PipelineScheduleRuntime(run.stages, n_microbatches=4, loss_fn=loss_of)
    swap = swapped(pipeline)
    for run in (plain, pipeline):
        run.schedule._load_csv(str(file), "compute_comms")
    for seed in range(2):
        assert plain.step(seed).equals(pipeline.step(seed))
    assert swap.stats().offloaded_bytes > 0
    assert swap.stats().reload_misses == 0
    assert clean(swap)


def evaluation_moves_nothing() -> None:
    plain, pipeline, swap = pair("1F1B")
    for seed in range(2):
        assert plain.step(seed).equals(pipeline.step(seed))
        swap.reset_stats()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                records = [run.evaluate(seed) for run in (plain, pipeline)]
            assert all(map(torch.equal, *(record.losses for record in records)))
        stats = swap.stats()
        assert stats.offloaded_bytes == 0
        assert not stats.kept_bytes
    assert plain.step(5).equals(pipeline.step(5))
    assert swap.stats().offloaded_bytes > 0
    assert clean(swap)


def a_schedule_without_loss_moves_nothing() -> None:
    pipeline = Pipeline("GPipe", microbatches=4)
    pipeline.schedule = type(pipeline.schedule)(pipeline.stages[0], n_microbatches=4)
    swap = swapped(pipeline)
    tokens = torch.zeros((4, 16), dtype=torch.long)
    # With grad, as a careless evaluation: without, attention is passed by in any case.
    pipeline.schedule.step(*((tokens,) if pipeline.stages[0].is_first else ()))
    assert swap.stats().offloaded_bytes == 0
    assert clean(swap)


class PlannedError(Exception):
    """Raised in the middle of a step."""


def a_failed_step_leaves_nothing(fail: Callable[[Pipeline], bool]) -> None:
    """``fail`` breaks the next step where no rank waits for another, if it breaks it at all."""
    plain, pipeline, swap = pair("GPipe")
    assert plain.step(0).equals(pipeline.step(0))
    for run in (plain, pipeline):
        if fail(run):
            with pytest.raises((PlannedError, RuntimeError)):
                run.step(1)
        else:
            run.step(1)
        run.schedule._internal_losses.clear()  # torch keeps the losses of a failed step
    for seed in (2, 3):
        assert plain.step(seed).equals(pipeline.step(seed))
    assert clean(swap)


def in_the_last_forward_or_after_it(run: Pipeline) -> bool:
    model: Any = run.modules[0]
    if dist.get_rank() == 0:
        fail_call(run.stages[0], "get_bwd_recv_ops", 1)
    else:
        fail_call(model.model.layers[1].mlp, "forward", run.microbatches)
    return True


def in_the_last_backward(run: Pipeline) -> bool:
    model: Any = run.modules[0]
    if dist.get_rank() == 1:
        return False
    calls = 0
    weight = model.model.layers[1].self_attn.q_proj.weight

    def count(_: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == run.microbatches:
            handle.remove()
            raise PlannedError

    handle = weight.register_hook(count)
    return True


def fail_call(owner: Any, name: str, number: int) -> None:
    """Raise in call ``number`` of a method, and take the trap away."""
    original = getattr(owner, name)
    calls = 0

    def trap(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            setattr(owner, name, original)
            raise PlannedError
        return original(*args, **options)

    setattr(owner, name, trap)


def overlapped_members_run_on_two_threads() -> None:
    plain, pipeline, swap = pair("DualPipeV", microbatches=6)
    for run in (plain, pipeline):
        overlap(run)
    for seed in range(2):
        assert plain.step(seed).equals(pipeline.step(seed))
    assert swap.stats().offloaded_bytes > 0
    assert swap.stats().reload_misses == 0
    assert clean(swap)


def overlap(run: Pipeline) -> None:
    """Run the backward of an overlapped step on a second thread, as torchtitan does."""
    schedule = run.schedule
    by_index = {stage.stage_index: stage for stage in run.stages}

    def both(action: Any, context: Any) -> None:
        forward, backward = action.sub_actions
        ahead, behind = by_index[forward.stage_index], by_index[backward.stage_index]
        receive(schedule.fwd_recv_ops, ahead, forward, by_index)
        receive(schedule.bwd_recv_ops, behind, backward, by_index)
        errors: list[BaseException] = []

        def run_backward() -> None:
            try:
                loss = schedule._maybe_get_loss(behind, backward.microbatch_index)
                schedule.backward_counter[backward.stage_index] += 1
                behind.backward_one_chunk(
                    backward.microbatch_index, loss=loss, full_backward=True, last_backward=False
                )
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                errors.append(error)

        thread = threading.Thread(target=run_backward)
        thread.start()
        index = forward.microbatch_index
        output = ahead.forward_one_chunk(index, context.arg_mbs[index], context.kwarg_mbs[index])
        schedule._maybe_compute_loss(ahead, output, context.target_mbs, index)
        thread.join()
        if errors:
            raise errors[0]
        following = by_index.get(ahead.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, index)
        preceding = by_index.get(behind.stage_index - 1)
        if preceding is not None:
            gradient = behind.get_local_bwd_output(backward.microbatch_index)
            preceding.set_local_bwd_input(gradient, backward.microbatch_index)

    schedule.register_custom_function(_ComputationType.OVERLAP_F_B, both)


def receive(pending: Any, stage: Any, action: Any, by_index: Any) -> None:
    forward = action.computation_type is _ComputationType.FORWARD
    source = stage.stage_index + (-1 if forward else 1)
    end = stage.is_first if forward else stage.is_last
    if not end and source not in by_index:
        for work in pending.pop((stage.stage_index, action.microbatch_index)):
            work.wait()


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        an_unknown_order_reloads_on_demand_and_is_learned,
        evaluation_moves_nothing,
        a_schedule_without_loss_moves_nothing,
        overlapped_members_run_on_two_threads,
    )
} | {
    fail.__name__: partial(a_failed_step_leaves_nothing, fail)
    for fail in (in_the_last_forward_or_after_it, in_the_last_backward)
}


def run_cases(directory: Path) -> None:
    an_order_from_csv_may_come_after_the_attachment(directory)
    for case in CASES.values():
        case()


@pytest.mark.timeout(600)
def test_unusual_steps(tmp_path: Path) -> None:
    run_ranks(partial(run_cases, tmp_path), size=2, directory=tmp_path)


def test_records_differ_where_bits_do() -> None:
    """The comparison above can fail."""
    one = StepRecord(losses=[torch.zeros(1)], gradients={"w": torch.ones(2)}, calls=["a"])
    assert one.equals(StepRecord(one.losses, {"w": torch.ones(2)}, ["a"]))
    assert not one.equals(StepRecord(one.losses, {"w": torch.tensor([1.0, 2.0])}, ["a"]))
    assert not one.equals(StepRecord([torch.ones(1)], one.gradients, ["a"]))
    assert not one.equals(StepRecord(one.losses, one.gradients, ["b"]))
