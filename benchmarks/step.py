# SPDX-License-Identifier: Apache-2.0
"""Trains a few steps in one mode and measures them.

Gradients are applied by SGD inside backward and freed at once, so that the 30B model fits one GPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from activation_swap.trainer.device import determinism, synchronize
from benchmarks.gradients import digest
from benchmarks.model import trainable
from benchmarks.modes import Applied, NotRunError, apply
from benchmarks.timeline import profile_step

if TYPE_CHECKING:
    from benchmarks.runs import Point, Run

__all__ = ["Sgd", "measure"]


class Sgd:
    """Applies each gradient as soon as it is complete, and frees it.

    Attributes:
        digests: While not ``None``: a hash of every gradient by parameter name.
    """

    def __init__(self, model: Any, *, lr: float, update: bool) -> None:
        self._lr = lr
        self._update = update
        self.digests: dict[str, torch.Tensor] | None = None
        for name, parameter in trainable(model):
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def _hook(self, name: str) -> Any:
        def apply_and_free(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if self.digests is not None:
                self.digests[name] = torch.hash_tensor(gradient)
            if self._update:
                with torch.no_grad():
                    parameter.add_(gradient, alpha=-self._lr)
            parameter.grad = None

        return apply_and_free


@dataclass(kw_only=True)
class _Clock:
    """Times of the steps in milliseconds."""

    steps: list[float] = field(default_factory=list)
    forward_queued: list[float] = field(default_factory=list)
    step_queued: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class _Loop:
    """One mode's training loop: a step is ``microbatches`` forwards and backwards."""

    model: Any
    applied: Applied
    batches: list[torch.Tensor]
    device: torch.device
    clock: _Clock = field(default_factory=_Clock)
    losses: list[torch.Tensor] = field(default_factory=list)

    def step(self) -> None:
        """Train one step from an idle device to an idle device."""
        synchronize(self.device)
        began = time.perf_counter()
        forward = self._queue()
        queued = time.perf_counter() - began
        synchronize(self.device)
        self.clock.steps.append((time.perf_counter() - began) * 1e3)
        self.clock.forward_queued.append(forward * 1e3)
        self.clock.step_queued.append(queued * 1e3)

    def back_to_back(self, steps: int) -> float:
        """Train without waiting for the device in between; return the milliseconds of a step.

        So does training that reads its loss now and then: the device is never idle while the host
        begins a step.
        """
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self._queue()
        synchronize(self.device)
        return (time.perf_counter() - began) * 1e3 / steps

    def _queue(self) -> float:
        """Launch a step; return the seconds of its forwards."""
        forward = 0.0
        for batch in self.batches:
            with self.applied.around_step():
                start = time.perf_counter()
                with self.applied.around_forward():
                    loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
                forward += time.perf_counter() - start
                loss.backward()
            self.losses.append(loss.detach())
        return forward


def measure(
    mode: str, model: Any, optimizer: Sgd, point: Point, *, run: Run, device: str
) -> dict[str, Any]:
    """Measure one point.

    Returns:
        ``outcome``: ``measured``, ``out of memory`` or ``not run``; with figures, or the reason.
    """
    try:
        applied = apply(mode, model, point.policy)
    except NotRunError as reason:
        return {"outcome": "not run", "reason": str(reason)}
    optimizer.digests = None
    outcome: dict[str, Any]
    try:
        figures = _train(model, applied, optimizer, point, run=run, device=device)
    except torch.OutOfMemoryError as error:
        # The frames of the error hold the graph.
        outcome = {"outcome": "out of memory", "reason": str(error).partition(". ")[0]}
        del error
    else:
        outcome = {"outcome": "measured", "about": applied.about, "figures": figures}
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        applied.remove()
        del applied
        gc.collect()
        if device != "cpu":
            torch.accelerator.empty_cache()
    return outcome


def _train(
    model: Any, applied: Applied, optimizer: Sgd, point: Point, *, run: Run, device: str
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(1)
    vocabulary = model.config.vocab_size
    batches = [
        torch.randint(vocabulary, (1, point.tokens), device=device, generator=generator)
        for _ in range(point.microbatches)
    ]
    loop = _Loop(model=model, applied=applied, batches=batches, device=torch.device(device))
    with determinism(enabled=run.deterministic):
        for _ in range(run.warmup):
            loop.step()
        warm, loop.clock = loop.clock, _Clock()
        base_bytes = None
        if device != "cpu":
            base_bytes = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
        applied.reset_stats()
        for _ in range(run.steps):
            loop.step()
    figures = {
        **_time_figures(loop.clock),
        "first_step_ms": warm.steps[0] if warm.steps else None,
        "base_bytes": base_bytes,
        **_memory_figures(device),
        **_swap_figures(applied, run.steps * point.microbatches),
        "back_to_back_ms": loop.back_to_back(run.steps),
    }
    figures["losses"] = [float(loss) for loss in loop.losses]
    # Without copies, gradients are garbage.
    figures |= _digest_figures(loop, optimizer) if run.update else {"gradient_digest": None}
    if point.trace and device != "cpu":
        figures["timeline"] = profile_step(loop.step)
    return figures


def _digest_figures(loop: _Loop, optimizer: Sgd) -> dict[str, Any]:
    """Hash every gradient of one more step; none where its algorithms need too much memory."""
    optimizer.digests = {}
    try:
        with determinism(enabled=True):
            loop.step()
    except torch.OutOfMemoryError:
        return {"gradient_digest": None}
    else:
        return {
            "gradient_digest": digest(optimizer.digests),
            "gradients": len(optimizer.digests),
        }
    finally:
        optimizer.digests = None


def _time_figures(clock: _Clock) -> dict[str, Any]:
    return {
        "step_ms": statistics.median(clock.steps),
        "step_ms_min": min(clock.steps),
        "step_ms_max": max(clock.steps),
        "step_ms_all": list(clock.steps),
        "forward_queued_ms": statistics.median(clock.forward_queued),
        "step_queued_ms": statistics.median(clock.step_queued),
    }


def _memory_figures(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"peak_bytes": None, "peak_reserved_bytes": None}
    return {
        "peak_bytes": torch.accelerator.max_memory_allocated(),
        "peak_reserved_bytes": torch.accelerator.max_memory_reserved(),
    }


def _swap_figures(applied: Applied, forwards: int) -> dict[str, Any]:
    """Return the swap's counters, bytes per forward; empty for modes that have none."""
    if applied.stats is None:
        return {}
    stats = applied.stats()
    kept = {reason.value: nbytes // forwards for reason, nbytes in stats.kept_bytes.items()}
    # All that could move: what was given up, and what a lack of memory or a change left behind.
    left = sum(kept.get(reason, 0) for reason in ("host_memory", "changed", "schedule"))
    saved = stats.saved_bytes // forwards
    return {
        "eligible_bytes": saved + left,
        "saved_bytes": saved,
        "offloaded_bytes": stats.offloaded_bytes // forwards,
        "reloaded_bytes": stats.reloaded_bytes // forwards,
        "offloaded_storages": stats.offloaded_storages // forwards,
        "reload_misses": stats.reload_misses,
        "late_releases": stats.late_releases,
        "host_bytes_reserved": stats.host_bytes_reserved,
        "resident_bytes_peak": stats.resident_bytes_peak,
        "kept_bytes": kept,
    }
