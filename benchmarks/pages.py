# SPDX-License-Identifier: Apache-2.0
"""The pages of ``docs/benchmarks/``: generated from results, never written by hand."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Final

from benchmarks.peers import NOT_RUN
from benchmarks.plots import plot_growth, plot_memory_and_time, plot_timeline
from benchmarks.rank_tables import link_table, rank_table
from benchmarks.results import Result, load, read, summary
from benchmarks.runs import RANK_RUNS, RUNS, SCRIPTS, STAGE_RUNS
from benchmarks.tables import conditions, cost_table, growth_lines, not_run_lines, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["render"]

_HEADER: Final = "<!-- Made by `python -m benchmarks render`; do not edit. -->"
_PLOTS: Final[dict[str, tuple[str, Callable[[Sequence[Result], Path], bool]]]] = {
    "memory": ("peak memory against step time", plot_memory_and_time),
    "timeline": ("one step: compute, D2H and H2D", plot_timeline),
    "growth": ("growth", plot_growth),
}
_WITHOUT: Final = {
    "memory": {"growth", "cost", "equality", *SCRIPTS, *STAGE_RUNS, *RANK_RUNS},
    "growth": (RUNS.keys() - {"growth", "single"}) | RANK_RUNS.keys(),
}
"""Runs of which such a plot says nothing."""

_ABOUT: Final = {name: run.about for name, run in RUNS.items()} | SCRIPTS | STAGE_RUNS | RANK_RUNS
_INTRODUCTION: Final = (
    "This page lists what was measured, and what was not. Every table says on which machine, with",
    "which versions and by which command.",
)
_READING: Final = """\
How to read the tables:

- *of none*: median step time by that of `none`.
- *off the peak*: what the peak of device memory fell by.
- *of eligible*: that by the bytes that attention saves in all layers but the last, as the swap
  counts them.
- *predicted*, *of the prediction*: what `activation-swap plan` takes off the peak of the rank that
  is the fullest without the swap, and how much of that came true.
- *ms per GB off*: step time for each 10^9 bytes off the peak.
- *back to back*: time of a step when the CPU never waits for the device between steps; the other
  times are of steps that begin and end with an idle device.
- *forward queued*: when the CPU had launched the forward.
- *gradients equal*: a hash of every gradient of one step under deterministic algorithms is that of
  `none`.
"""


def render(folders: Iterable[Path], docs: Path) -> None:
    """Take results in and make every page anew.

    Args:
        folders: Results as ``run`` wrote them. Each replaces the older one of the same measurement;
            one that failed, or was not run, replaces none that was.
        docs: Where the pages are; the results of all runs are kept in ``results`` there.
    """
    kept = docs / "results"
    kept.mkdir(parents=True, exist_ok=True)
    _take_in(folders, kept)
    results = load([kept])
    names = [name for name in RUNS if any(result.run == name for result in results)]
    names += sorted({result.run for result in results} - set(names))
    for name in names:
        own = [result for result in results if result.run == name]
        (docs / f"{name}.md").write_text(_page(name, own, docs), encoding="utf-8")
    (docs / "overview.md").write_text(_index(results, names), encoding="utf-8")
    rows = json.dumps(summary(results), indent=2)
    (docs / "summary.json").write_text(rows + "\n", encoding="utf-8")


def _take_in(folders: Iterable[Path], kept: Path) -> None:
    known = {path: read(path) for path in sorted(kept.glob("*.json"))}
    others = [folder for folder in folders if folder.resolve() != kept.resolve()]
    for path in (path for folder in others for path in sorted(folder.glob("*.json"))):
        results = read(path)
        older = [name for name, own in known.items() if _again(results, own)]
        if not _reached(results) and any(_reached(known[name]) for name in older):
            continue
        for name in older:
            name.unlink()
            del known[name]
        target = kept / path.name
        while target in known:
            # Of another measurement: the points that --tokens leaves are numbered anew.
            target = target.with_stem(f"{target.stem}-more")
        shutil.copyfile(path, target)
        known[target] = results


def _again(results: Sequence[Result], older: Sequence[Result]) -> bool:
    return any(result.same_measurement(known) for result in results for known in older)


def _reached(results: Sequence[Result]) -> bool:
    return any(result.reached for result in results)


def _page(name: str, results: Sequence[Result], docs: Path) -> str:
    lines = [
        _HEADER,
        "",
        f"# {name}",
        "",
        _ABOUT.get(name, ""),
        "",
        *conditions(results),
        "",
        *table(results),
        "",
    ]
    if name == "cost":
        lines += [*cost_table(results), ""]
    if name in {"growth", "single"}:
        lines += [*growth_lines(results), ""]
    for more in (rank_table(results), link_table(results)):
        lines += [*more, ""] if more else []
    notes = [*_about_lines(results), *_reason_lines(results), *_note_lines(results)]
    if name == "peers":
        notes += not_run_lines(NOT_RUN)
    lines += [*notes, ""] if notes else []
    for kind, (caption, plot) in _PLOTS.items():
        path = docs / f"{name}-{kind}.png"
        path.unlink(missing_ok=True)
        if name not in _WITHOUT.get(kind, ()) and plot(results, path):
            lines += [f"![{caption}]({path.name})", ""]
    return "\n".join(lines)


def _about_lines(results: Sequence[Result]) -> list[str]:
    abouts = {r.mode: r.record["about"] for r in results if r.record.get("about")}
    return [f"- {mode}: {about}." for mode, about in abouts.items()]


def _reason_lines(results: Sequence[Result]) -> list[str]:
    return [
        f"- {result.mode}, {result.work}: {result.record['outcome']}: "
        f"{result.record['reason'].rstrip('.')}."
        for result in results
        if not result.measured
    ]


def _note_lines(results: Sequence[Result]) -> list[str]:
    return [f"- {note}" for note in dict.fromkeys(r.note for r in results if r.note)]


def _index(results: Sequence[Result], names: Sequence[str]) -> str:
    runs = [f"- [{name}]({name}.md): {_ABOUT.get(name, '')}" for name in names]
    missing = [f"- {name}: {text}" for name, text in _ABOUT.items() if name not in names]
    measured = {(result.run, result.mode) for result in results if result.measured}
    missing += [
        f"- {result.mode} in {result.run}: {result.record['reason']}."
        for result in results
        if (result.run, result.mode) not in measured
    ]
    return "\n".join(
        [
            *(_HEADER, "", "# Overview", "", *_INTRODUCTION, "", *runs, ""),
            *("Not measured, so that nothing is claimed of them:", "", *missing, ""),
            *("[How figures are made](about.md) says how to make them again.", "", _READING),
        ]
    )
