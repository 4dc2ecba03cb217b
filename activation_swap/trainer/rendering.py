# SPDX-License-Identifier: Apache-2.0
"""A report as text: the table of the terminal and ``report.md``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from activation_swap.trainer.link_probe import LinkRates
    from activation_swap.trainer.measure import StepTime
    from activation_swap.trainer.pipeline_compare import RankReport
    from activation_swap.trainer.report import ModeReport, Report

__all__ = ["markdown", "rank_table", "table"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
        ("compute waited for copies", lambda mode: _seconds(mode.waited_seconds_per_step)),
        ("fraction whose copies hide", lambda mode: _part(mode.hiding_fraction)),
        ("pinned host memory", lambda mode: _bytes(mode.host_bytes_reserved)),
        ("reload misses", lambda mode: str(mode.reload_misses)),
        ("late releases", lambda mode: str(mode.late_releases)),
    ]
    none, attention = report.modes["none"], report.modes["attention"]
    return [(name, _cell(none, show), _cell(attention, show)) for name, show in rows]


def rank_table(ranks: Sequence[RankReport]) -> dict[str, list[str]]:
    """Return the columns of a pipeline's table: by heading, the cell of each rank."""
    columns: dict[str, Callable[[RankReport], str]] = {
        "rank": lambda rank: str(rank.rank),
        "stages": lambda rank: ", ".join(map(str, rank.stages)),
        "offloaded": lambda rank: _bytes(rank.offloaded_bytes),
        "reload misses": lambda rank: str(rank.reload_misses),
        "resident peak": lambda rank: _bytes(rank.resident_saved_bytes_peak),
        "waited per step": lambda rank: _seconds(rank.waited_seconds),
        "hiding fraction": lambda rank: _part(rank.hiding_fraction),
        "s per step": lambda rank: " > ".join(f"{s:.3f}" for s in rank.step_seconds.values()),
    }
    return {name: [show(rank) for rank in ranks] for name, show in columns.items()}


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
        *_gain_lines(report),
        *_kept_lines(report),
        *_link_lines(report.link),
        *(f"- {note}" for note in report.notes),
        "",
        "![memory and step time](report.png)",
        "",
    ]
    return "\n".join(lines)


def _cell(mode: ModeReport, show: Callable[[ModeReport], str]) -> str:
    return "out of memory" if mode.out_of_memory else show(mode)


def _gain_lines(report: Report) -> list[str]:
    if report.peak_saved_bytes is None or report.step_time_ratio is None:
        return []
    share = "" if report.peak_saved_share is None else f" ({report.peak_saved_share:.1%} of them)"
    eligible = _bytes(report.modes["none"].resident_saved_bytes_peak)
    return [
        f"- Eligible saved bytes: {eligible}.",
        f"- Peak device memory: lower by {_bytes(report.peak_saved_bytes)}{share}.",
        f"- Step time: {report.step_time_ratio:.3f} of `none`.",
    ]


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


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _step_time(times: StepTime | None) -> str:
    return "-" if times is None else _seconds(times.median)


def _spread(times: StepTime | None) -> str:
    return "-" if times is None else f"{_seconds(times.fastest)} to {_seconds(times.slowest)}"


def _verdict(value: bool | None) -> str:  # noqa: FBT001 - a value, not a switch
    return {None: "not checked", True: "yes", False: "no"}[value]
