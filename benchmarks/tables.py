# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables, each with what it was measured on and how."""

from __future__ import annotations

from statistics import linear_regression
from typing import TYPE_CHECKING, Any, Final

from benchmarks.results import Comparison, Result, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["conditions", "cost_table", "growth_lines", "markdown", "not_run_lines", "table"]

_GIB: Final = 2**30
_ENOUGH_FOR_A_LINE: Final = 3


def table(results: Sequence[Result]) -> list[str]:
    """Return one row for each result; columns without any value are left out."""
    comparisons = compare(results)
    columns = [
        (title, cells)
        for title, show in _COLUMNS
        if any(cells := [show(comparison) for comparison in comparisons])
    ]
    return markdown([title for title, _ in columns], zip(*(c for _, c in columns), strict=True))


def conditions(results: Sequence[Result]) -> list[str]:
    """Return what every table states: machine, versions, shape, command, date, repetitions."""
    record = next((r for r in results if r.record["machine"]), results[0]).record
    machine = record["machine"]
    if machine is None:
        return ["- no process got so far as to describe its machine"]
    facts = {
        "GPU": f"{record['gpus']} x {machine['gpu']}" if machine["gpu"] else "none: run on the CPU",
        "CPU": f"{machine['cpu']}{_bound(machine)}",
        "link, probed in the same processes": _links(results),
        "versions": (
            f"torch {machine['torch']}, transformers {machine['transformers']}, "
            f"Python {machine['python']}"
        ),
        "shape": f"{record['shape']}, bf16, SDPA, batch 1, random weights, seeded",
        "optimizer": _optimizer(record),
        "repetitions": record.get("repetitions")
        or (
            f"{record['warmup']} warm-up and {record['steps']} timed steps in one process per "
            "mode; median, fastest and slowest"
        ),
        "command": ", ".join(dict.fromkeys(f"`{result.record['command']}`" for result in results)),
        "date": ", ".join(sorted({result.record["date"][:10] for result in results})),
    }
    return [f"- {name}: {value}" for name, value in facts.items()]


def _bound(machine: dict[str, Any]) -> str:
    """Return whether the processes were bound to some of the CPUs, as with ``taskset``."""
    usable, all_of_them = machine.get("cpus", (0, 0))
    return f", bound to {usable} of {all_of_them}" if usable < all_of_them else ""


def cost_table(results: Sequence[Result]) -> list[str]:
    """Return the CPU time that the hooks add when nothing is copied."""
    rows = []
    for comparison in compare(results):
        result, base = comparison.result, comparison.base
        if result.mode == "none" or base is None or not result.measured:
            continue
        added = (
            (result.figures[key] - base.figures[key]) / result.layers
            for key in ("forward_queued_ms", "step_queued_ms", "step_ms", "back_to_back_ms")
        )
        rows.append((f"{result.tokens:,}", *(f"{each:.3f}" for each in added)))
    titles = ("tokens", "forward queued", "forward and backward queued", "step", "back to back")
    return ["Added by the hooks, ms per layer and step:", "", *markdown(titles, rows)]


def growth_lines(results: Sequence[Result]) -> list[str]:
    """Return how far bytes and time are from a straight line over layers, tokens, microbatches."""
    lines = []
    for axis, figure, unit in (
        ("layers", "saved_bytes", "bytes"),
        ("layers", "step_ms", "ms"),
        ("tokens", "saved_bytes", "bytes"),
        ("microbatches", "step_ms", "ms"),
    ):
        points = growth(results, axis=axis, figure=figure, mode="attention")
        if len(points) < _ENOUGH_FOR_A_LINE:
            continue
        slope, intercept = linear_regression(*zip(*points, strict=True))
        off = max(abs(y - (slope * x + intercept)) / y for x, y in points)
        lines.append(
            f"- {figure} over {axis}: {slope:,.4g} {unit} each, at most {off:.2%} off the line"
        )
    return lines


def growth(
    results: Sequence[Result], *, axis: str, figure: str, mode: str
) -> list[tuple[float, float]]:
    """Return the points of ``figure`` over ``axis``, all else at its most frequent value."""
    others = [name for name in ("layers", "tokens", "microbatches") if name != axis]
    known = [result for result in results if result.mode == mode and result.measured]
    settings = [tuple(getattr(result, name) for name in others) for result in known]
    if not settings:
        return []
    usual = max(sorted(set(settings)), key=settings.count)
    return sorted(
        (float(getattr(result, axis)), float(result.figures[figure]))
        for result, setting in zip(known, settings, strict=True)
        if setting == usual and result.figures.get(figure) is not None
    )


def not_run_lines(reasons: Mapping[str, str]) -> list[str]:
    """Return the peers that no process can run."""
    return [f"- {name}: {reason}." for name, reason in reasons.items()]


def markdown(titles: Sequence[str], rows: Any) -> list[str]:
    """Return a table: text to the left in the first column, numbers to the right in the others."""
    return [
        f"| {' | '.join(titles)} |",
        f"|{'|'.join([' --- ', *(' ---: ' for _ in titles[1:])])}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _links(results: Sequence[Result]) -> str:
    rates: dict[str, list[float]] = {}
    for result in results:
        machine = result.record["machine"] or {}
        for name, rate in (machine.get("link_bytes_per_second") or {}).items():
            rates.setdefault(name, []).append(rate / 1e9)
    if not rates:
        return "none"
    return ", ".join(
        f"{name} {min(known):.1f} to {max(known):.1f} GB/s" for name, known in rates.items()
    )


def _optimizer(record: dict[str, Any]) -> str:
    if "optimizer" in record:
        return str(record["optimizer"])
    if not record.get("update", True):
        return "none: gradients are freed inside backward, no kernel applies them"
    if record["lr"]:
        return f"SGD inside backward, lr {record['lr']:g}, gradients freed at once"
    return (
        "SGD inside backward, gradients freed at once, lr 0: its kernels run and every step starts "
        "from the same weights, so that losses and gradients can be compared"
    )


def _policy(comparison: Comparison) -> str:
    return ", ".join(f"{key} {value:,}" for key, value in comparison.result.policy.items())


def _step(comparison: Comparison) -> str:
    record, figures = comparison.result.record, comparison.result.figures
    return f"{figures['step_ms']:.1f}" if figures else str(record["outcome"])


def _spread(comparison: Comparison) -> str:
    figures = comparison.result.figures
    return f"{figures['step_ms_min']:.1f} to {figures['step_ms_max']:.1f}" if figures else ""


def _figure(name: str, form: str = ".0f", scale: float = 1) -> Callable[[Comparison], str]:
    def show(comparison: Comparison) -> str:
        value = comparison.result.figures.get(name)
        return "" if value is None else format(value / scale, form)

    return show


def _derived(name: str, form: str, scale: float = 1) -> Callable[[Comparison], str]:
    def show(comparison: Comparison) -> str:
        value = getattr(comparison, name)
        if value is None or comparison.result is comparison.base:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value / scale, form)

    return show


_COLUMNS: Final[tuple[tuple[str, Callable[[Comparison], str]], ...]] = (
    ("mode", lambda c: c.result.mode),
    ("schedule", lambda c: c.result.schedule),
    ("stages a rank", lambda c: str(c.result.stages_per_rank or "")),
    ("tokens", lambda c: f"{c.result.tokens:,}"),
    ("layers", lambda c: str(c.result.layers)),
    ("microbatches", lambda c: str(c.result.microbatches) if c.result.microbatches > 1 else ""),
    ("policy", _policy),
    ("step, ms", _step),
    ("fastest to slowest", _spread),
    ("of none", _derived("step_time_ratio", ".3f")),
    ("back to back, ms", _figure("back_to_back_ms", ".1f")),
    ("of none, back to back", _derived("back_to_back_ratio", ".3f")),
    ("peak, GiB", _figure("peak_bytes", ".2f", _GIB)),
    ("reserved, GiB", _figure("peak_reserved_bytes", ".2f", _GIB)),
    ("off the peak, GiB", _derived("freed_bytes", ".3f", _GIB)),
    ("predicted, GiB", _derived("predicted_bytes", ".3f", _GIB)),
    ("of the prediction", _derived("freed_of_predicted", ".1%")),
    ("of eligible", _derived("freed_fraction", ".1%")),
    ("ms per GB off", _derived("ms_per_gb", ".2f")),
    ("forward queued, ms", _figure("forward_queued_ms")),
    ("first step, ms", _figure("first_step_ms")),
    ("offloaded, GiB", _figure("offloaded_bytes", ".2f", _GIB)),
    ("pinned, GiB", _figure("host_bytes_reserved", ".2f", _GIB)),
    ("reload misses", _figure("reload_misses")),
    ("losses equal", _derived("losses_equal", "")),
    ("gradients equal", _derived("gradients_equal", "")),
)
