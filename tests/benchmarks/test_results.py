# SPDX-License-Identifier: Apache-2.0
"""What the tables and plots say follows from the measurements."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.lanes import lanes_of
from benchmarks.pages import render
from benchmarks.plots import plot_growth, plot_memory_and_time, plot_timeline
from benchmarks.results import Result, compare, load, read, summary
from benchmarks.tables import cost_table, growth_lines, table

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

GB = 10**9


def result(mode: str, *, tokens: int = 4096, layers: int = 48, **figures: Any) -> Result:
    measured = {"step_ms_min": 0.5, "step_ms_max": 9000.0, "gradient_digest": "a", **figures}
    return Result(
        {
            "run": "single",
            "mode": mode,
            "point": {"tokens": tokens, "layers": layers, "microbatches": 1, "policy": {}},
            "gpus": 1,
            "outcome": "measured" if figures else "out of memory",
            "reason": "too much",
            "figures": measured if figures else {},
            "machine": {"torch": "2.11.0", "transformers": "5.17.0"},
            "date": "2026-01-01T00:00:00+00:00",
        }
    )


NONE = result("none", step_ms=500.0, peak_bytes=100 * GB)
SWAPPED = result("attention", step_ms=510.0, peak_bytes=90 * GB, eligible_bytes=10 * GB)
PEER = result("trl", step_ms=1000.0, peak_bytes=75 * GB, gradient_digest="b")


def test_ratios_are_to_none_of_the_same_work() -> None:
    other = result("none", tokens=1024, step_ms=1.0, peak_bytes=1)
    _, _, swapped, peer = compare([other, NONE, SWAPPED, PEER])
    assert swapped.step_time_ratio == 1.02
    assert swapped.freed_bytes == 10 * GB
    assert swapped.freed_fraction == 1.0
    assert swapped.ms_per_gb == 1.0
    assert swapped.gradients_equal is True
    assert (peer.ms_per_gb, peer.gradients_equal) == (20.0, False)
    assert peer.eligible_bytes == 10 * GB, "what attention counted"


def test_no_ratio_gains_by_a_slow_none() -> None:
    slow = result("none", step_ms=600.0, peak_bytes=100 * GB)
    for order in ([slow, SWAPPED, NONE], [NONE, SWAPPED, slow]):
        by_result = {id(found.result): found for found in compare(order)}
        assert by_result[id(SWAPPED)].step_time_ratio == 1.02
        assert by_result[id(slow)].step_time_ratio == 1.2


def test_out_of_memory_is_a_row_of_the_table_and_none_of_the_summary() -> None:
    lost = result("none", tokens=8192)
    trained = result("attention", tokens=8192, step_ms=963.0, peak_bytes=124 * GB)
    assert any("out of memory" in line for line in table([lost, trained]))
    rows = summary([lost, trained])
    assert [(row["mode"], row["step_time_ratio"]) for row in rows] == [("attention", None)]
    assert rows[0]["outcome_none"] == "out of memory"


def write(folder: Path, name: str, known: Result, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(known.record | changes), encoding="utf-8")


def steps(docs: Path) -> dict[str, list[tuple[str, int, float | None]]]:
    """Return what is kept: mode, tokens and time of each measurement, by the name of its file."""
    return {
        path.stem: [
            (known.mode, known.tokens, known.figures.get("step_ms")) for known in read(path)
        ]
        for path in sorted((docs / "results").glob("*.json"))
    }


MADE = {
    "shape": "tiny",
    "lr": 0.0,
    "warmup": 1,
    "steps": 1,
    "machine": {
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "python": "3.12",
        "gpu": "a GPU",
        "cpu": "a CPU",
    },
}
"""What a page asks of a record beside its figures."""


def test_a_part_that_is_made_again_replaces_nothing_else(tmp_path: Path) -> None:
    docs, first, part = (tmp_path / name for name in ("docs", "first", "part"))
    short = result("none", tokens=1024, step_ms=100.0, peak_bytes=GB)
    write(first, "single-00-none-00", short, command="run single", **MADE)
    write(first, "single-00-none-01", NONE, command="run single", **MADE)
    write(first, "single-01-attention-00", SWAPPED, command="run single", **MADE)
    render([first], docs)
    kept = steps(docs)
    assert len(kept) == 3
    again = result("none", step_ms=480.0, peak_bytes=100 * GB)
    # Its number in a run of one length alone is that of another length in the whole run.
    write(part, "single-00-none-00", again, command="run single --tokens 4096", **MADE)
    render([part], docs)
    del kept["single-00-none-01"]
    assert steps(docs) == {**kept, "single-00-none-00-more": [("none", 4096, 480.0)]}
    page = (docs / "single.md").read_text(encoding="utf-8")
    assert "- command: `run single`, `run single --tokens 4096`" in page
    assert "| none | 4,096 | 48 | 480.0 |" in page


@pytest.mark.parametrize("outcome", ["failed", "not run"])
def test_what_did_not_get_so_far_replaces_no_figures(tmp_path: Path, outcome: str) -> None:
    docs, first, second = (tmp_path / name for name in ("docs", "first", "second"))
    write(first, "single-01-attention-00", SWAPPED, command="run single", **MADE)
    render([first], docs)
    kept = steps(docs)
    point = {**SWAPPED.record["point"], "layers": None}
    broken: dict[str, Any] = {
        "outcome": outcome,
        "reason": "too slow",
        "figures": {},
        "machine": None,
    }
    write(second, "single-01-attention-00", SWAPPED, **(MADE | {"point": point} | broken))
    render([second], docs)
    assert steps(docs) == kept
    write(second, "single-01-attention-00", SWAPPED, command="run", **MADE, outcome="out of memory")
    render([second], docs)
    lost = (docs / "results" / "single-01-attention-00.json").read_text(encoding="utf-8")
    assert json.loads(lost)["outcome"] == "out of memory", "that is a result"


def test_a_page_tells_apart_what_failed_and_whether_gradients_were_applied(tmp_path: Path) -> None:
    docs, folder = tmp_path / "docs", tmp_path / "folder"
    point = {"tokens": 2048, "layers": 12, "policy": {}}
    for number in (2, 4):
        more = MADE | {"point": point | {"microbatches": number}, "outcome": "failed"}
        write(folder, f"growth-{number}", SWAPPED, command="run", run="growth", **more)
    write(folder, "cost", NONE, command="run", **(MADE | {"run": "cost", "update": False}))
    render([folder], docs)
    growth = (docs / "growth.md").read_text(encoding="utf-8")
    assert "- attention, 2 x 2,048 tokens: failed" in growth
    assert "- attention, 4 x 2,048 tokens: failed" in growth
    assert "its kernels run" in growth
    cost = (docs / "cost.md").read_text(encoding="utf-8")
    assert "no kernel applies them" in cost
    assert "its kernels run" not in cost


def test_a_note_is_on_the_page_and_what_was_not_measured_on_the_overview(tmp_path: Path) -> None:
    machine = {"date": "2026-01-01T00:00:00+00:00", "torch": "2.11.0", "transformers": "5.17.0"}
    figures = {"step_ms": 1.0, "step_ms_min": 1.0, "step_ms_max": 1.0, "peak_bytes": GB}
    digests = {"losses": [1.0], "gradient_digest": "a", "saved_bytes": 0, "ranks": 1}
    machine |= {"gpu": "a GPU", "cpu": "a CPU", "python": "3.12"}
    rows = [
        {"mode": mode, **figures, **digests, "machine": machine} for mode in ("none", "attention")
    ]
    command = "python -m benchmarks.lora --shape=tiny --layers=2 --tokens=8 --steps=1 --warmup=1"
    report = {"command": command, "note": "The machine was busy.", "rows": rows}
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "lora.json").write_text(json.dumps(report), encoding="utf-8")
    render([folder], tmp_path)
    assert "- The machine was busy." in (tmp_path / "lora.md").read_text(encoding="utf-8")
    overview = (tmp_path / "overview.md").read_text(encoding="utf-8")
    measured, _, missing = overview.partition("Not measured")
    assert "[lora](lora.md)" in measured
    assert "- growth: " in missing
    assert "- lora: " not in missing
    summary_rows = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [(row["note"], row["losses_equal"]) for row in summary_rows] == [
        ("The machine was busy.", True),
        ("The machine was busy.", True),
    ]


def test_a_stage_alone_is_beside_what_was_predicted_of_it(tmp_path: Path) -> None:
    machine = {"date": "2026-01-01T00:00:00+00:00", "torch": "2.11.0", "transformers": "5.17.0"}
    rows: list[dict[str, Any]] = [
        {"mode": "none", "peak_bytes": 4 * GB, "step_ms": 1.0, "machine": machine},
        {"mode": "attention", "peak_bytes": GB, "step_ms": 1.5, "machine": machine},
    ]
    rows[1]["predicted_bytes"] = 2 * GB
    command = "python -m benchmarks.stage --tokens=8 --layers=2 --microbatches=4 --steps=1"
    report = {"run": "pipeline-stage", "shape": "tiny", "command": f"{command} --warmup=1"}
    path = tmp_path / "pipeline-stage-8.json"
    path.write_text(json.dumps(report | {"rows": rows}), encoding="utf-8")
    none, swapped = summary(load([tmp_path]))
    assert "predicted_bytes" not in none
    assert (swapped["name"], swapped["microbatches"]) == ("pipeline-stage", 4)
    assert (swapped["predicted_bytes"], swapped["freed_of_predicted"]) == (2 * GB, 1.5)


def test_growth_is_measured_against_a_line() -> None:
    straight = [
        result("attention", layers=layers, step_ms=10.0 * layers, saved_bytes=GB * layers)
        for layers in (12, 24, 48)
    ]
    assert growth_lines(straight) == [
        "- saved_bytes over layers: 1e+09 bytes each, at most 0.00% off the line",
        "- step_ms over layers: 10 ms each, at most 0.00% off the line",
    ]


def test_the_cost_of_the_hooks_is_by_layer_and_none_of_the_clocks_is_left_out() -> None:
    clocks = ("forward_queued_ms", "step_queued_ms", "step_ms", "back_to_back_ms")
    without: dict[str, Any] = dict.fromkeys(clocks, 480.0)
    with_hooks: dict[str, Any] = dict(zip(clocks, (528.0, 504.0, 480.0, 576.0), strict=True))
    none, hooked = result("none", **without), result("no_copies", **with_hooks)
    assert cost_table([none, hooked])[-1] == "| 4,096 | 1.000 | 0.500 | 0.000 | 2.000 |"


def event(name: str, stream: int, start: float, *, kind: str = "kernel") -> dict[str, Any]:
    known = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": 10.0}
    return {**known, "args": {"stream": stream}}


def test_lanes_follow_streams_and_merge_what_touches() -> None:
    copied = {"kind": "gpu_memcpy"}
    trace = lanes_of(
        [
            *(event("gemm", 7, 100.0 + 10 * number) for number in range(3)),
            event("gemm", 7, 200.0),
            event("Memcpy DtoH (Device -> Pinned)", 7, 220.0, **copied),
            event("narrow", 8, 110.0),
            event("Memcpy DtoH (Device -> Pinned)", 8, 120.0, **copied),
            event("Memcpy HtoD (Pinned -> Device)", 9, 150.0, **copied),
            event("activation_swap::offload(layers.0.self_attn)", 0, 90.0, kind="user_annotation"),
            {"ph": "M", "name": "metadata"},
        ]
    )
    assert trace["lanes"] == {
        "compute": [(0.0, 30.0), (100.0, 10.0), (120.0, 10.0)],
        "D2H": [(10.0, 20.0)],
        "H2D": [(50.0, 10.0)],
    }
    assert trace["ranges"] == {"activation_swap::offload": 1}


def test_plots_are_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    lanes = {"compute": [(0.0, 5.0)], "D2H": [(1.0, 2.0)], "H2D": []}
    traced = result("attention", step_ms=1.0, peak_bytes=1, timeline={"lanes": lanes})
    grown = [
        result(mode, layers=layers, step_ms=1.0, peak_bytes=1)
        for layers in (12, 24)
        for mode in ("none", "attention")
    ]
    for plot, results in (
        (plot_memory_and_time, [NONE, SWAPPED, PEER]),
        (plot_timeline, [NONE, traced]),
        (plot_growth, grown),
    ):
        path = tmp_path / f"{plot.__name__}.png"
        assert plot(results, path)
        assert path.stat().st_size > 1000
        assert not plot([result("none")], path)
