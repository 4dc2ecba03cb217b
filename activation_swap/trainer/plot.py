# SPDX-License-Identifier: Apache-2.0
"""The picture beside a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from activation_swap.trainer.report import Report

__all__ = ["plot_report"]

_MIB = 1024 * 1024


def plot_report(report: Report, path: Path) -> None:
    """Draw memory and step times of both modes.

    Args:
        report: What to draw. A mode that ran out of memory is left out.
        path: PNG file to write.
    """
    measured = {name: mode for name, mode in report.modes.items() if not mode.out_of_memory}
    names = list(measured)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    memory, times = figure.subplots(1, 2)
    memory.bar(names, [(mode.peak_device_bytes or 0) / _MIB for mode in measured.values()])
    memory.set_title("peak device memory, MiB")
    times.boxplot(
        [
            [1e3 * seconds for seconds in mode.step_seconds.all]
            for mode in measured.values()
            if mode.step_seconds is not None
        ]
    )
    times.set_xticks(range(1, len(names) + 1), names)
    times.set_ylim(bottom=0)
    times.set_title("step time, ms")
    figure.suptitle(report.device)
    figure.savefig(path, dpi=120, format="png")
