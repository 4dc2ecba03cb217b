# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a measurement say each for itself, and how fast their links are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.results import compare
from benchmarks.tables import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Comparison, Result

__all__ = ["link_table", "rank_table"]

_GIB: Final = 2**30


def rank_table(results: Sequence[Result]) -> list[str]:
    """Return a row for each rank of each measured swap; nothing where no ranks are told apart."""
    rows = []
    for comparison in compare(results):
        result = comparison.result
        if result.mode == "none" or "ranks" not in result.figures:
            continue
        repeats = _none_repeats_itself(comparison, results)
        for number, own in enumerate(result.figures["ranks"]):
            base = None if comparison.base is None else comparison.base.figures["ranks"][number]
            rows.append((result.work, *_cells(own, base, repeats=repeats[number : number + 1])))
    if not rows:
        return []
    return ["Rank by rank, the swap beside `none`:", "", *markdown(_TITLES, rows)]


def link_table(results: Sequence[Result]) -> list[str]:
    """Return the rates of every rank's link, alone and while all copy; nothing on a CPU."""
    machines = [result.record["machine"] or {} for result in results]
    links = next((machine["links"] for machine in machines if "links" in machine), None)
    if links is None:
        return []
    rows = [
        (who, str(rank), *(f"{rates[name] / 1e9:.1f}" for name in _RATES))
        for who, key in (("one", "alone"), ("all", "together"))
        for rank, rates in enumerate(links[key])
    ]
    titles = ("ranks that copy", "rank", "d2h, GB/s", "h2d, GB/s", "each of both, GB/s")
    return ["Links between device and pinned host memory:", "", *markdown(titles, rows)]


_RATES: Final = ("d2h", "h2d", "d2h_both")
_TITLES: Final = (
    *("work", "rank", "none, GiB", "attention, GiB", "off the peak, GiB", "predicted, GiB"),
    *("of the prediction", "offloaded, GiB", "of planned", "chunks moved, but tail, kept"),
    *("reload misses", "late releases", "gradients equal", "none repeats itself"),
)


def _none_repeats_itself(comparison: Comparison, results: Sequence[Result]) -> list[bool]:
    """Return, by rank, whether two runs of ``none`` had the same gradients; empty if one ran."""
    nones = [
        result.figures["ranks"]
        for result in results
        if result.mode == "none" and result.measured and result.same_work(comparison.result)
    ]
    if len(nones) < 2:  # noqa: PLR2004 - two of them
        return []
    return [
        first["gradient_digest"] == again["gradient_digest"]
        for first, again in zip(nones[0], nones[1], strict=True)
    ]


def _cells(
    own: dict[str, Any], base: dict[str, Any] | None, *, repeats: Sequence[bool]
) -> tuple[str, ...]:
    before, after = (base or {}).get("peak_bytes"), own["peak_bytes"]
    freed = None if before is None or after is None else before - after
    planned = own.get("planned", {})
    predicted, crossing = planned.get("saved_bytes_at_peak"), planned.get("offloaded_bytes")
    moved = ("moved_chunks", "moved_but_tail_chunks", "kept_chunks")
    equal = None
    if base is not None and own["gradient_digest"]:
        equal = own["gradient_digest"] == base["gradient_digest"]
    return (
        str(own["rank"]),
        *(_gib(nbytes) for nbytes in (before, after, freed, predicted)),
        _part(freed, predicted),
        _gib(own["offloaded_bytes"]),
        _part(own["offloaded_bytes"], crossing),
        ", ".join(str(planned[name]) for name in moved if planned),
        str(own["reload_misses"]),
        str(own["late_releases"]),
        _yes(equal),
        _yes(next(iter(repeats), None)),
    )


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / _GIB:.2f}"


def _part(some: int | None, whole: int | None) -> str:
    return "" if some is None or not whole else f"{some / whole:.1%}"


def _yes(known: bool | None) -> str:  # noqa: FBT001 - a cell
    return {None: "", True: "yes", False: "no"}[known]
