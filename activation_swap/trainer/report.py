"""What a comparison found: the data of ``report.json`` and the table of ``report.md``."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

import activation_swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from activation_swap.trainer.config import Config
    from activation_swap.trainer.link import LinkRates
    from activation_swap.trainer.measure import Measurement, StepTime

__all__ = ["ModeReport", "Report", "build_report", "markdown", "table"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
        gradients_equal: Every gradient of the digested steps bitwise equal; likewise.
        baseline_repeats: Whether two runs of ``none`` were bitwise equal; ``None`` if not asked.
        first_difference: The first loss or gradient that differs.
        offloaded_bytes: Of ``attention``, over the timed steps.
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
    gradients_equal: bool | None
    baseline_repeats: bool | None
    first_difference: str | None
    offloaded_bytes: int
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
        """Whether nothing speaks against the swap here.

        A difference counts only where ``none`` repeats its own bits.
        """
        if self.modes["attention"].out_of_memory:
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
    difference = _first_difference(baseline, swapped) if complete else None
    repeats = None
    if repeated is not None and not (baseline.out_of_memory or repeated.out_of_memory):
        repeats = _first_difference(baseline, repeated) is None
    on_cpu = link is None
    modes: dict[str, ModeReport] = {
        measured.mode: _mode(measured, link=link, steps=config.compare.timed_steps)
        for measured in (baseline, swapped)
    }
    return Report(
        losses_equal=_losses(baseline) == _losses(swapped) if complete else None,
        gradients_equal=baseline.gradients == swapped.gradients if complete else None,
        baseline_repeats=repeats,
        first_difference=difference,
        offloaded_bytes=modes["attention"].offloaded_bytes,
        device=swapped.device or baseline.device,
        device_memory=(
            "the swap's own count of resident saved bytes: this machine has no accelerator"
            if on_cpu
            else "the allocator's peak of allocated bytes"
        ),
        notes=tuple(_notes(config, on_cpu=on_cpu, repeats=repeats)),
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


def table(report: Report) -> list[tuple[str, str, str]]:
    """Return the rows (quantity, ``none``, ``attention``) of the report's table."""
    rows: list[tuple[str, Callable[[ModeReport], str]]] = [
        ("peak device memory", lambda mode: _bytes(mode.peak_device_bytes)),
        ("resident saved bytes, peak", lambda mode: _bytes(mode.resident_saved_bytes_peak)),
        ("step time, median", lambda mode: _step_time(mode.step_seconds)),
        ("step time, fastest to slowest", lambda mode: _spread(mode.step_seconds)),
        ("offloaded per step", lambda mode: _bytes(mode.offloaded_bytes_per_step)),
        ("reloaded per step", lambda mode: _bytes(mode.reloaded_bytes_per_step)),
        ("D2H per step at the probed rate", lambda mode: _seconds(mode.d2h_seconds_per_step)),
        ("H2D per step at the probed rate", lambda mode: _seconds(mode.h2d_seconds_per_step)),
        ("pinned host memory", lambda mode: _bytes(mode.host_bytes_reserved)),
        ("reload misses", lambda mode: str(mode.reload_misses)),
        ("late releases", lambda mode: str(mode.late_releases)),
    ]
    none, attention = report.modes["none"], report.modes["attention"]
    return [(name, _cell(none, show), _cell(attention, show)) for name, show in rows]


def markdown(report: Report) -> str:
    """Return ``report.md``."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    verdicts = {
        "losses equal": report.losses_equal,
        "gradients equal": report.gradients_equal,
        "`none` repeats its own bits": report.baseline_repeats,
    }
    lines = [
        "# activation_swap: none against attention",
        "",
        f"{report.device}; {versions}.",
        "",
        *(f"- {name}: **{_verdict(value)}**" for name, value in verdicts.items()),
        *([f"- first difference: {report.first_difference}"] if report.first_difference else []),
        "",
        "| | none | attention |",
        "| --- | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in table(report)),
        "",
        *_kept_lines(report),
        *_link_lines(report.link),
        *(f"- {note}" for note in report.notes),
        "",
        "![memory and step time](report.png)",
        "",
    ]
    return "\n".join(lines)


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
        saved_bytes=stats.saved_bytes,
        host_bytes_reserved=stats.host_bytes_reserved,
        reload_misses=stats.reload_misses,
        late_releases=stats.late_releases,
        kept_bytes={str(reason): nbytes for reason, nbytes in sorted(stats.kept_bytes.items())},
    )


def _cell(mode: ModeReport, show: Callable[[ModeReport], str]) -> str:
    return "out of memory" if mode.out_of_memory else show(mode)


def _losses(measured: Measurement) -> list[str]:
    # As text, so that NaN equals NaN and nothing else equals anything.
    return [loss.hex() for loss in measured.losses]


def _first_difference(left: Measurement, right: Measurement) -> str | None:
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


def _notes(config: Config, *, on_cpu: bool, repeats: bool | None) -> Iterator[str]:
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
    if repeats is False:
        yield (
            "`none` does not repeat its own bits here, so a difference is not the swap's; try "
            "`deterministic: true`."
        )


def _kept_lines(report: Report) -> list[str]:
    kept = report.modes["attention"].kept_bytes
    if not kept:
        return []
    reasons = ", ".join(
        f"{reason} {_bytes(nbytes / report.steps['timed'])}" for reason, nbytes in kept.items()
    )
    return [f"- Kept on the device per step, by reason: {reasons}."]


def _link_lines(link: LinkRates | None) -> list[str]:
    if link is None:
        return []
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in asdict(link).items())
    return [f"- Link, probed alone with pinned memory: {rates}."]


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - bytes per KiB
        value, unit = value / 1024, unit + 1
    return f"{value:.{2 if unit else 0}f} {_UNITS[unit]}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f} ms"


def _step_time(times: StepTime | None) -> str:
    return "-" if times is None else _seconds(times.median)


def _spread(times: StepTime | None) -> str:
    return "-" if times is None else f"{_seconds(times.fastest)} to {_seconds(times.slowest)}"


def _verdict(value: bool | None) -> str:  # noqa: FBT001 - a value, not a switch
    return {None: "not checked", True: "yes", False: "no"}[value]
