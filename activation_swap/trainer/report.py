# SPDX-License-Identifier: Apache-2.0
"""What a comparison found: the data of ``report.json``."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

import activation_swap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from activation_swap.trainer.config import Config
    from activation_swap.trainer.link_probe import LinkRates
    from activation_swap.trainer.measure import Measurement, StepTime

__all__ = [
    "NOTHING_MOVED",
    "NOT_FINITE",
    "ModeReport",
    "Report",
    "build_report",
    "finite_losses",
    "first_difference",
]

NOTHING_MOVED = (
    "Nothing was offloaded, so equal bits tell nothing of the swap, and the comparison fails. "
    "Small storages and those of the last layer stay on the device: try a longer "
    "`sequence_length`, or more layers."
)
NOT_FINITE = (
    "A loss is infinite or not a number. Equal bits then tell nothing of the swap, and the "
    "comparison fails. Try a lower `optimizer.lr`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeReport:
    """One mode's figures. Bytes and seconds; ``None`` where nothing could be measured.

    Attributes:
        out_of_memory: The device ran out of memory, and nothing else was measured.
        step_seconds: Of the timed steps.
        peak_device_bytes: Peak device memory over the timed steps; what it counts is in
            ``Report.device_memory``.
        resident_saved_bytes_peak: Largest device bytes of eligible saved tensors at one time.
        offloaded_bytes: Crossed the link to the host in the timed steps.
        offloaded_bytes_per_step: The same per step.
        reloaded_bytes: Crossed the link back in the timed steps.
        reloaded_bytes_per_step: The same per step.
        d2h_seconds_per_step: ``offloaded_bytes_per_step`` at the probed rate.
        h2d_seconds_per_step: ``reloaded_bytes_per_step`` at the probed rate.
        waited_seconds_per_step: What compute waited for copies; ``None`` where no device tells.
        hiding_fraction: The ``SwapPolicy.fraction`` at which it would not wait; likewise.
        saved_bytes: Device bytes given up in the timed steps.
        host_bytes_reserved: Pinned host memory reserved at the end.
        reload_misses: Groups that no prefetch had reloaded in time.
        late_releases: Groups whose backward began before their memory was given up.
        kept_bytes: Bytes left on the device in the timed steps, by reason.
    """

    out_of_memory: bool = False
    step_seconds: StepTime | None = None
    peak_device_bytes: int | None = None
    resident_saved_bytes_peak: int | None = None
    offloaded_bytes: int = 0
    offloaded_bytes_per_step: float = 0.0
    reloaded_bytes: int = 0
    reloaded_bytes_per_step: float = 0.0
    d2h_seconds_per_step: float | None = None
    h2d_seconds_per_step: float | None = None
    waited_seconds_per_step: float | None = None
    hiding_fraction: float | None = None
    saved_bytes: int = 0
    host_bytes_reserved: int = 0
    reload_misses: int = 0
    late_releases: int = 0
    kept_bytes: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A comparison of ``none`` with ``attention``.

    Attributes:
        losses_equal: Loss of every step bitwise equal; ``None`` if a mode ran out of memory.
        losses_finite: No loss of either mode is infinite or not a number.
        gradients_equal: Every gradient of the digested steps bitwise equal; likewise.
        baseline_repeats: Whether two runs of ``none`` were bitwise equal; ``None`` if not asked.
        first_difference: The first loss or gradient that differs.
        offloaded_bytes: Of ``attention``, over the timed steps.
        peak_saved_bytes: Peak device memory of ``none`` less that of ``attention``.
        peak_saved_share: The same as a part of the eligible bytes, which are the resident saved
            bytes of ``none``.
        step_time_ratio: Median step time of ``attention`` over that of ``none``.
        device: Name of the device.
        device_memory: What ``peak_device_bytes`` counts here.
        notes: How to read the figures.
        steps: Number of digested, warm-up and timed steps.
        link: Probed rates of the link, bytes per second; ``None`` on a CPU.
        modes: Figures per mode.
        versions: Of Python, torch, transformers and this package.
        config: The configuration as JSON data.
    """

    losses_equal: bool | None
    losses_finite: bool
    gradients_equal: bool | None
    baseline_repeats: bool | None
    first_difference: str | None
    offloaded_bytes: int
    peak_saved_bytes: int | None
    peak_saved_share: float | None
    step_time_ratio: float | None
    device: str
    device_memory: str
    notes: tuple[str, ...]
    steps: dict[str, int]
    link: LinkRates | None
    modes: dict[str, ModeReport]
    versions: dict[str, str]
    config: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether bytes moved and nothing speaks against the swap here.

        A difference counts only where ``none`` repeats its own bits. Where nothing moved, which is
        so too when ``attention`` ran out of memory, equal bits tell nothing; nor do those of NaN.
        """
        if not (self.offloaded_bytes and self.losses_finite):
            return False
        differs = self.losses_equal is False or self.gradients_equal is False
        return not differs or self.baseline_repeats is False

    def data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self)


def build_report(
    config: Config,
    *,
    baseline: Measurement,
    swapped: Measurement,
    repeated: Measurement | None,
    link: LinkRates | None,
) -> Report:
    """Put the measurements side by side.

    Args:
        config: What was run.
        baseline: Mode ``none``.
        swapped: Mode ``attention``.
        repeated: Mode ``none`` once more, or ``None``.
        link: Rates of the link, or ``None`` on a CPU.

    Returns:
        The report.
    """
    complete = not (baseline.out_of_memory or swapped.out_of_memory)
    difference = first_difference(baseline, swapped) if complete else None
    repeats = None
    if repeated is not None and not (baseline.out_of_memory or repeated.out_of_memory):
        repeats = first_difference(baseline, repeated) is None
    on_cpu = link is None
    modes: dict[str, ModeReport] = {
        measured.mode: _mode(measured, link=link, steps=config.compare.timed_steps)
        for measured in (baseline, swapped)
    }
    none, attention = modes["none"], modes["attention"]
    finite = finite_losses(baseline, swapped)
    saved = _difference(none.peak_device_bytes, attention.peak_device_bytes)
    return Report(
        losses_equal=_losses(baseline) == _losses(swapped) if complete else None,
        losses_finite=finite,
        gradients_equal=baseline.gradients == swapped.gradients if complete else None,
        baseline_repeats=repeats,
        first_difference=difference,
        offloaded_bytes=attention.offloaded_bytes,
        peak_saved_bytes=saved,
        peak_saved_share=_ratio(saved, none.resident_saved_bytes_peak),
        step_time_ratio=_ratio(_median(attention), _median(none)),
        device=swapped.device or baseline.device,
        device_memory=(
            "the swap's own count of resident saved bytes: this machine has no accelerator"
            if on_cpu
            else "the allocator's peak of allocated bytes"
        ),
        notes=tuple(_notes(config, attention, finite=finite, on_cpu=on_cpu, repeats=repeats)),
        steps={
            "digested": config.compare.digest_steps,
            "warmup": config.compare.warmup_steps,
            "timed": config.compare.timed_steps,
        },
        link=link,
        modes=modes,
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "activation_swap": activation_swap.__version__,
        },
        config=config.model_dump(mode="json"),
    )


def first_difference(left: Measurement, right: Measurement) -> str | None:
    """Return which gradient or loss of two measurements is the first that differs in a bit.

    Args:
        left: Of as many steps as ``right``.
        right: What it is compared with.

    Returns:
        Its step and name, or ``None`` when all are equal.
    """
    steps = enumerate(zip(left.gradients, right.gradients, strict=True), start=1)
    for step, (before, after) in steps:
        for label in [*before, *(label for label in after if label not in before)]:
            if before.get(label) != after.get(label):
                return f"step {step}, gradient of {label}"
    pairs = zip(_losses(left), _losses(right), strict=True)
    for step, (loss_before, loss_after) in enumerate(pairs, start=1):
        if loss_before != loss_after:
            return f"step {step}, loss"
    return None


def finite_losses(*measurements: Measurement) -> bool:
    """Return whether every loss of the measurements is a finite number."""
    return all(math.isfinite(loss) for measured in measurements for loss in measured.losses)


def _mode(measured: Measurement, *, link: LinkRates | None, steps: int) -> ModeReport:
    stats = measured.stats
    if stats is None:
        return ModeReport(out_of_memory=True)
    out, back = stats.offloaded_bytes / steps, stats.reloaded_bytes / steps
    resident = measured.resident_saved_bytes_peak
    return ModeReport(
        step_seconds=measured.step_time,
        peak_device_bytes=resident if link is None else measured.peak_device_bytes,
        resident_saved_bytes_peak=resident,
        offloaded_bytes=stats.offloaded_bytes,
        offloaded_bytes_per_step=out,
        reloaded_bytes=stats.reloaded_bytes,
        reloaded_bytes_per_step=back,
        d2h_seconds_per_step=None if link is None else out / link.d2h,
        h2d_seconds_per_step=None if link is None else back / link.h2d,
        waited_seconds_per_step=measured.waited_seconds,
        hiding_fraction=measured.hiding_fraction,
        saved_bytes=stats.saved_bytes,
        host_bytes_reserved=stats.host_bytes_reserved,
        reload_misses=stats.reload_misses,
        late_releases=stats.late_releases,
        kept_bytes={str(reason): nbytes for reason, nbytes in sorted(stats.kept_bytes.items())},
    )


def _losses(measured: Measurement) -> list[str]:
    # As text, so that NaN equals NaN and nothing else equals anything.
    return [loss.hex() for loss in measured.losses]


def _notes(
    config: Config, attention: ModeReport, *, finite: bool, on_cpu: bool, repeats: bool | None
) -> Iterator[str]:
    compare = config.compare
    yield (
        f"Losses are compared over all steps, gradients over the first {compare.digest_steps}; "
        f"times, bytes and memory are of the last {compare.timed_steps}, with nothing else going "
        "on."
    )
    if on_cpu:
        yield (
            "There is no accelerator: the host transfer copies within this machine's memory. "
            "Device memory is the swap's own count of resident saved bytes; for `none` it is "
            "counted in one more step, which keeps everything. Step times say nothing about a "
            "GPU."
        )
    if not (attention.offloaded_bytes or attention.out_of_memory):
        yield NOTHING_MOVED
    if not finite:
        yield NOT_FINITE
    if repeats is False:
        yield (
            "`none` does not repeat its own bits here, so a difference is not the swap's; try "
            "`deterministic: true`."
        )


def _difference(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _median(mode: ModeReport) -> float | None:
    return None if mode.step_seconds is None else mode.step_seconds.median
