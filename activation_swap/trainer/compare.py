# SPDX-License-Identifier: Apache-2.0
"""The command ``activation-swap compare``: none against attention, each in its own process."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rich.console import Console
from rich.table import Table

from activation_swap.trainer.config import load_config
from activation_swap.trainer.link_probe import probe_link
from activation_swap.trainer.measure import measure
from activation_swap.trainer.output import OutputDirectory
from activation_swap.trainer.pipeline_compare import compare_pipeline
from activation_swap.trainer.plot import plot_report
from activation_swap.trainer.rendering import markdown, table
from activation_swap.trainer.report import build_report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from activation_swap.trainer.config import Config
    from activation_swap.trainer.report import Report

__all__ = ["add_arguments", "compare", "run", "write_report"]

_TABLE_WIDTH = 80

P = ParamSpec("P")
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="replace a value of the file, for example compare.timed_steps=20",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, print and write the report; the exit code is 0 only if the comparison passed.

    Raises:
        RejectedError: AS415 when the output directory cannot be made; and what the configuration
            and the run are refused for.
    """
    config = load_config(arguments.config, arguments.overrides)
    if config.pp_size > 1:
        return 0 if compare_pipeline(config).passed else 1
    OutputDirectory(config.output)  # made now, not after the measurement
    report = compare(config)
    write_report(report, config.output)
    _show(report, config.output)
    return 0 if report.passed else 1


def compare(config: Config) -> Report:
    """Measure both modes.

    Args:
        config: The run; ``config.compare`` says which steps.

    Returns:
        The report.
    """
    link = _in_own_process(probe_link, config.device)
    baseline = _in_own_process(measure, config, "none")
    repeated = _in_own_process(measure, config, "none") if config.compare.repeat_baseline else None
    swapped = _in_own_process(measure, config, "attention")
    return build_report(config, baseline=baseline, swapped=swapped, repeated=repeated, link=link)


def write_report(report: Report, directory: Path) -> None:
    """Write ``report.json``, ``report.md`` and ``report.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(json.dumps(report.data(), indent=2) + "\n", "utf-8")
    (directory / "report.md").write_text(markdown(report), "utf-8")
    plot_report(report, directory / "report.png")


def _in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in a fresh process: no memory, stream or cache of one mode is left for the next."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _show(report: Report, directory: Path) -> None:
    shown = Table("", "none", "attention", title=f"activation_swap on {report.device}")
    for row in table(report):
        shown.add_row(*row)
    terminal = Console()
    console = Console(width=max(terminal.width, _TABLE_WIDTH))
    console.print(shown)
    console.print(f"losses equal: {report.losses_equal}, gradients: {report.gradients_equal}")
    for note in report.notes:
        console.print(note, style="dim")
    console.print(f"report: {directory / 'report.md'}")
