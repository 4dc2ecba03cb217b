# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt between any two lines of what follows a pipeline schedule."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.core import chunks, install
from activation_swap.core.schedule import runner, torch_pipelining
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.faults.harness import at_base, next_backward
from tests.faults.interrupter import Interrupter, interrupted_removals
from tests.pipeline.tiny_pipeline import Pipeline
from tests.schedule.fake_world import fake_world

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]

OURS = frozenset(str(module.__file__) for module in (chunks, runner, torch_pipelining))
SCHEDULES = ("Interleaved1F1B", "ZBVZeroBubble")


def apply_to(pipeline: Pipeline) -> Any:
    return registry.apply(
        "attention",
        pipeline.modules,
        setup=TrainingSetup(pp_size=2),
        policy=SwapPolicy(min_bytes=1, slab_bytes=1 << 16),
    )


def is_interrupted(pipeline: Pipeline, number: int) -> bool:
    """Begin a step that ends at line ``number`` of those that follow the schedule."""
    try:
        with Interrupter(number, OURS):
            pipeline.step(7)
    except KeyboardInterrupt:
        # Torch's own, and the only trace of the step that a schedule does not clear.
        pipeline.schedule._internal_losses.clear()
        return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_interrupted_in_any_line_of_a_pipeline_step(name: str, record_property: Any) -> None:
    """The next steps are right and swapped, on the same attachment; nothing is left after them."""
    with fake_world(0, 1):
        plain, pipeline = (Pipeline(name, microbatches=2) for _ in range(2))
        expected = plain.step(1)
        swap = apply_to(pipeline)
        swap.attach(pipeline.schedule)
        with Interrupter(0, OURS) as trace:
            assert pipeline.step(1).equals(expected)
        assert trace.lines > 300
        moved = swap.stats().offloaded_bytes
        interrupted = 0
        for number in range(1, trace.lines + 1, max(1, trace.lines // 100)):
            interrupted += is_interrupted(pipeline, number)
            swap.reset_stats()
            for steps in (1, 2):
                assert pipeline.step(1).equals(expected), f"line {number}"
                assert swap.stats().offloaded_bytes == steps * moved, f"line {number}"
            assert top_saved_tensor_hooks() is None
            next_backward()
            assert at_base(swap), f"line {number}: {swap.stats()}"
        swap.remove()
        assert swap.stats().host_bytes_reserved == 0
        assert pipeline.step(1).equals(expected)
    record_property("interrupts", interrupted)
    assert interrupted >= 90


class Remover:
    """Removes a swap in a signal handler, which Python runs between two lines."""

    def __init__(self, swap: Any) -> None:
        self.swap = swap
        self.runs = 0

    def __call__(self, *_: object) -> None:
        self.runs += 1
        self.swap.remove()


class Signaller(Interrupter):
    """Raises a signal in place of an exception."""

    def interrupt(self) -> None:
        """Let the handler run here."""
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.timeout(300)
def test_removed_by_a_signal_handler_in_any_line_of_a_pipeline_step() -> None:
    """It neither deadlocks nor changes a gradient: this step's, or those of the next."""
    with fake_world(0, 1):
        plain, pipeline = (Pipeline("Interleaved1F1B", microbatches=2) for _ in range(2))
        expected = plain.step(1)
        swap = apply_to(pipeline)
        swap.attach(pipeline.schedule)
        with Interrupter(0, OURS) as trace:
            pipeline.step(1)
        swap.remove()
        before = signal.getsignal(signal.SIGUSR1)
        removed = 0
        try:
            for number in range(1, trace.lines + 1, max(1, trace.lines // 60)):
                swap = apply_to(pipeline)
                swap.attach(pipeline.schedule)
                remover = Remover(swap)
                signal.signal(signal.SIGUSR1, remover)
                with Signaller(number, OURS):
                    assert pipeline.step(1).equals(expected), f"line {number}"
                removed += remover.runs
                swap.remove()
                next_backward()
                assert swap.stats().live_groups == 0, f"line {number}"
                assert swap.stats().host_bytes_reserved == 0
                assert pipeline.step(1).equals(expected), f"line {number}"
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert removed >= 50


@pytest.mark.parametrize("again", [False, True], ids=["interrupt", "handler"])
def test_removal_that_is_interrupted_in_any_line_restores_the_stages(*, again: bool) -> None:
    """At last by a second call; then another swap may follow the schedule."""
    files = OURS | {str(install.__file__)}
    with fake_world(0, 1):
        plain, pipeline = (Pipeline("Interleaved1F1B", microbatches=2) for _ in range(2))
        expected = plain.step(1)
        number = 0

        def begin() -> Any:
            swap = apply_to(pipeline)
            swap.attach(pipeline.schedule)
            return swap

        for number, _ in interrupted_removals(begin, files, again=again):
            for stage in pipeline.stages:
                left = {"forward_one_chunk", "backward_one_chunk"} & vars(stage).keys()
                assert not left, f"line {number}"
                assert "clear_runtime_states" not in vars(stage)
        assert number > 40
        assert pipeline.step(1).equals(expected)
