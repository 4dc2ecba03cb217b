# SPDX-License-Identifier: Apache-2.0
"""One mode of a comparison, measured in a process of its own."""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from activation_swap import SwapPolicy, registry
from activation_swap.trainer.device import (
    determinism,
    peak_device_bytes,
    ran_out_of_memory,
    reset_peak_device_bytes,
)
from activation_swap.trainer.digest import GradientDigest
from activation_swap.trainer.loop import Trainer
from activation_swap.trainer.progress import step_progress

if TYPE_CHECKING:
    from activation_swap import Mode, Swap, SwapStats
    from activation_swap.trainer.config import Config
    from activation_swap.trainer.loop import StepResult
    from activation_swap.trainer.optimizer import Optimizer
    from activation_swap.trainer.progress import Advance

__all__ = ["MeasuredTrainer", "Measurement", "StepTime", "measure", "measure_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of the timed steps.

    Attributes:
        median: Median.
        fastest: Minimum.
        slowest: Maximum.
        all: One value per step, in order.
    """

    median: float
    fastest: float
    slowest: float
    all: tuple[float, ...]

    @classmethod
    def of(cls, seconds: tuple[float, ...]) -> StepTime:
        """Summarise step times; at least one."""
        return cls(
            median=statistics.median(seconds),
            fastest=min(seconds),
            slowest=max(seconds),
            all=seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one mode gave.

    Attributes:
        mode: ``none`` or ``attention``.
        out_of_memory: The device ran out of memory; nothing else was measured then.
        device: Name of the device.
        losses: Loss of every step, as the device computed it.
        gradients: Per digested step, the digest of every gradient by parameter.
        step_time: Seconds of the timed steps.
        peak_device_bytes: The allocator's peak over the timed steps; ``None`` on a CPU.
        resident_saved_bytes_peak: Largest device bytes of eligible saved tensors at one time.
            For ``none`` counted in one more step, under a policy that keeps all of them.
        stats: The swap's counters over the timed steps; ``None`` when out of memory.
        waited_seconds: What compute waited for copies in a warm-up step; ``None`` where nothing
            moved, or no device could tell.
        hiding_fraction: The part of what moved whose copies would have hidden behind compute, as
            :class:`~activation_swap.Overlap` finds it; likewise.
    """

    mode: Mode
    out_of_memory: bool = False
    device: str = ""
    losses: tuple[float, ...] = ()
    gradients: tuple[dict[str, str], ...] = ()
    step_time: StepTime | None = None
    peak_device_bytes: int | None = None
    resident_saved_bytes_peak: int | None = None
    stats: SwapStats | None = None
    waited_seconds: float | None = None
    hiding_fraction: float | None = None


class MeasuredTrainer(Protocol):
    """What is measured.

    Attributes:
        device: Where the weights are.
        optimizer: Sees every gradient.
        swap: The swap, active or not.
    """

    device: torch.device
    optimizer: Optimizer
    swap: Swap

    def step(self) -> StepResult:
        """Train on the next microbatches."""


def measure(config: Config, mode: Mode) -> Measurement:
    """Run the steps of ``config.compare`` in one mode.

    Args:
        config: The run; its own ``activation_swap`` is ignored.
        mode: What to measure.

    Returns:
        The measurement. Running out of device memory is a result, not an error.
    """
    config = config.model_copy(update={"activation_swap": mode})
    total = sum(
        (config.compare.digest_steps, config.compare.warmup_steps, config.compare.timed_steps)
    )
    with (
        determinism(enabled=config.deterministic),
        step_progress(f"{mode:>9}", total=total) as advance,
    ):
        try:
            return _measure(config, mode, advance)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            return Measurement(mode=mode, out_of_memory=True)


def _measure(config: Config, mode: Mode, advance: Advance) -> Measurement:
    trainer = Trainer(config)
    measured = measure_steps(trainer, config, mode, advance)
    if mode == "none":
        measured = replace(measured, resident_saved_bytes_peak=_count_resident(trainer))
    return measured


def measure_steps(
    trainer: MeasuredTrainer, config: Config, mode: Mode, advance: Advance
) -> Measurement:
    """Run and measure the steps of ``config.compare`` on a trainer that has run none.

    Args:
        trainer: Set up for ``mode``.
        config: The run.
        mode: What ``trainer`` was set up for.
        advance: Called after each step.

    Returns:
        The measurement, with the resident bytes that the swap itself counted.
    """
    losses: list[float] = []

    def step() -> float:
        result = trainer.step()
        losses.append(result.loss)
        advance(loss=result.loss)
        return result.seconds

    digest = GradientDigest(trainer.device)
    trainer.optimizer.observer = digest.observe
    gradients = []
    for _ in range(config.compare.digest_steps):
        step()
        gradients.append(digest.finish())
    trainer.optimizer.observer = None
    del digest
    # Not in the timed steps: its events cost some time of their own.
    with trainer.swap.measure_overlap() as overlap:
        for _ in range(config.compare.warmup_steps):
            step()
    trainer.swap.reset_stats()
    reset_peak_device_bytes(trainer.device)
    seconds = tuple(step() for _ in range(config.compare.timed_steps))
    peak = peak_device_bytes(trainer.device)
    stats = trainer.swap.stats()
    seen = overlap.waits > 0
    return Measurement(
        mode=mode,
        device=_device_name(trainer.device),
        losses=tuple(losses),
        gradients=tuple(gradients),
        step_time=StepTime.of(seconds),
        peak_device_bytes=peak,
        resident_saved_bytes_peak=stats.resident_bytes_peak,
        stats=stats,
        waited_seconds=overlap.waited_ms / 1e3 / config.compare.warmup_steps if seen else None,
        hiding_fraction=overlap.fraction if seen else None,
    )


def _count_resident(trainer: Trainer) -> int | None:
    """Count what the swap would have moved, in one more step that moves nothing."""
    with warnings.catch_warnings():
        # The policy below leaves no host memory on purpose; the engine warns of that.
        warnings.simplefilter("ignore", RuntimeWarning)
        swap = registry.apply("attention", trainer.model, policy=SwapPolicy(max_host_bytes=0))
        try:
            trainer.step()
            return swap.stats().resident_bytes_peak
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            return None
        finally:
            swap.remove()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))
