# SPDX-License-Identifier: Apache-2.0
"""The command ``activation-swap compare``: none against attention, each in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from activation_swap.trainer.config import load_config
from activation_swap.trainer.link_probe import probe_link
from activation_swap.trainer.measure import measure
from activation_swap.trainer.output import OutputDirectory
from activation_swap.trainer.own_process import in_own_process
from activation_swap.trainer.pipeline_compare import compare_pipeline
from activation_swap.trainer.plot import plot_report
from activation_swap.trainer.ranks import refuse_ranks
from activation_swap.trainer.rendering import markdown, table
from activation_swap.trainer.report import build_report

if TYPE_CHECKING:
    import argparse

    from activation_swap.trainer.config import Config
    from activation_swap.trainer.report import Report

__all__ = ["add_arguments", "compare", "run", "write_report"]

_TABLE_WIDTH = 80


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
        RejectedError: AS412 when torchrun started several processes of a run that is none of a
            pipeline, AS415 when the output directory cannot be written to, AS418 when another run
            writes there; and what the configuration and the run are refused for.
        SwapStateError: AS417 when the report cannot be written, or a process was killed.
    """
    config = load_config(arguments.config, arguments.overrides)
    if config.pp_size > 1:
        return 0 if compare_pipeline(config).passed else 1
    refuse_ranks()
    with OutputDirectory(config.output) as output:
        try:
            report = compare(config)
        finally:
            Console(stderr=True).show_cursor()  # a process that was ended may have hidden it
        write_report(report, output)
    _show(report, config.output)
    return 0 if report.passed else 1


def compare(config: Config) -> Report:
    """Measure both modes.

    Args:
        config: The run; ``config.compare`` says which steps.

    Returns:
        The report.
    """
    link = in_own_process(probe_link, config.device)
    baseline = in_own_process(measure, config, "none")
    repeated = in_own_process(measure, config, "none") if config.compare.repeat_baseline else None
    swapped = in_own_process(measure, config, "attention")
    return build_report(config, baseline=baseline, swapped=swapped, repeated=repeated, link=link)


def write_report(report: Report, output: OutputDirectory) -> None:
    """Write ``report.json``, ``report.md`` and ``report.png``, in place of those of an earlier one.

    Raises:
        SwapStateError: AS417 when one cannot be written; an earlier report is as it was.
    """
    output.replace_report(
        {
            "report.json": lambda path: path.write_text(
                json.dumps(report.data(), indent=2) + "\n", "utf-8"
            ),
            "report.md": lambda path: path.write_text(markdown(report), "utf-8"),
            "report.png": lambda path: plot_report(report, path),
        }
    )


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
