# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: memory against time, a step's timeline, growth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from benchmarks.lanes import LANES
from benchmarks.tables import growth

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.results import Result

__all__ = ["plot_growth", "plot_memory_and_time", "plot_timeline"]

_GIB: Final = 2**30
_COLOURS: Final = {"compute": "tab:gray", "D2H": "tab:orange", "H2D": "tab:blue"}
_DPI: Final = 120


def plot_memory_and_time(results: Sequence[Result], path: Path) -> bool:
    """Draw one point for each mode and number of tokens; ``False`` where no memory is known."""
    known = [r for r in results if r.measured and r.figures["peak_bytes"] is not None]
    if not known:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    one_length = len({result.tokens for result in known}) == 1
    for mode in dict.fromkeys(result.mode for result in known):
        points = [result for result in known if result.mode == mode]
        x = [result.figures["peak_bytes"] / _GIB for result in points]
        y = [result.figures["step_ms"] for result in points]
        low = [result.figures["step_ms"] - result.figures["step_ms_min"] for result in points]
        high = [result.figures["step_ms_max"] - result.figures["step_ms"] for result in points]
        axes.errorbar(x, y, yerr=[low, high], fmt="o", capsize=3, label=mode)
        for result, at_x, at_y in zip(points, x, y, strict=True):
            label = mode if one_length else f"{result.tokens:,}"
            axes.annotate(
                label, (at_x, at_y), textcoords="offset points", xytext=(5, 5), fontsize=8
            )
    axes.set_xlabel("peak device memory, GiB")
    axes.set_ylabel("step time, ms (median, fastest, slowest)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    if not one_length:
        axes.legend()
    figure.savefig(path, dpi=_DPI)
    return True


def plot_timeline(results: Sequence[Result], path: Path) -> bool:
    """Draw the lanes of the first profiled step; ``False`` where none was profiled."""
    traced = next((result for result in results if result.figures.get("timeline")), None)
    if traced is None:
        return False
    lanes = traced.figures["timeline"]["lanes"]
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(LANES):
        spans = [(start / 1e3, length / 1e3) for start, length in lanes[lane]]
        axes.broken_barh(spans, (-row - 0.4, 0.8), color=_COLOURS[lane])
    axes.set_yticks([-row for row in range(len(LANES))], LANES)
    axes.set_xlabel("ms")
    axes.set_title(f"one step, {traced.mode}, {traced.tokens:,} tokens, profiled", fontsize=9)
    figure.savefig(path, dpi=_DPI)
    return True


def plot_growth(results: Sequence[Result], path: Path) -> bool:
    """Draw memory and time over layers, tokens and microbatches; ``False`` without such."""
    axes_names = [
        axis
        for axis in ("layers", "tokens", "microbatches")
        if len(growth(results, axis=axis, figure="step_ms", mode="attention")) > 1
    ]
    if not axes_names:
        return False
    figure = Figure(figsize=(4 * len(axes_names), 6), layout="constrained")
    grid = figure.subplots(2, len(axes_names), squeeze=False)
    for column, axis in enumerate(axes_names):
        for row, (name, scale, label) in enumerate(
            (("peak_bytes", _GIB, "peak device memory, GiB"), ("step_ms", 1, "step time, ms"))
        ):
            axes = grid[row][column]
            for mode in ("none", "attention"):
                points = growth(results, axis=axis, figure=name, mode=mode)
                axes.plot([x for x, _ in points], [y / scale for _, y in points], "o-", label=mode)
            axes.set_xlabel(axis)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.legend()
    figure.savefig(path, dpi=_DPI)
    return True
