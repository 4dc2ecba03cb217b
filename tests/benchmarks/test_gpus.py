# SPDX-License-Identifier: Apache-2.0
"""What a machine of several GPUs runs, over gloo on a CPU and a shape too small to time."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpus import PARTS, main
from benchmarks.pages import render
from benchmarks.pipeline_points import PipelinePoint, expected_peak, plan_point
from benchmarks.rank_tables import link_table, rank_table
from benchmarks.ranks import Records
from benchmarks.results import Result, compare, summary
from benchmarks.runs import RANK_RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 2**30
THIRTY_BILLION = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def result(mode: str, peaks: tuple[int, int], *, repeat: int = 0, digests: str = "ab") -> Result:
    ranks = [
        {
            "rank": rank,
            "peak_bytes": peak * GIB,
            "gradient_digest": digest,
            "offloaded_bytes": 0 if mode == "none" else 11 * GIB,
            "reload_misses": 0,
            "late_releases": 3,
            "planned": {
                "saved_bytes_at_peak": 20 * GIB,
                "offloaded_bytes": 10 * GIB,
                "moved_chunks": 8,
                "moved_but_tail_chunks": 1,
                "kept_chunks": 7,
            },
        }
        for rank, (peak, digest) in enumerate(zip(peaks, digests, strict=True))
    ]
    figures = {
        "step_ms": 500.0,
        "step_ms_min": 490.0,
        "step_ms_max": 510.0,
        "peak_bytes": max(peaks) * GIB,
        "losses": [1.0],
        "gradient_digest": digests,
        "ranks": ranks,
    }
    point = {"schedule": "GPipe", "stages_per_rank": 1, "tokens": 2048, "layers": 48}
    rates = {"d2h": 54e9, "h2d": 55e9, "d2h_both": 48e9, "h2d_both": 48e9}
    return Result(
        {
            "run": "pipeline-2",
            "mode": mode,
            "repeat": repeat,
            "gpus": 2,
            "point": {**point, "microbatches": 8, "policy": {}},
            "outcome": "measured",
            "figures": figures,
            "date": "2026-01-01",
            "machine": {
                "torch": "2.11.0",
                "transformers": "5.17.0",
                "links": {"alone": [rates, rates], "together": [rates, rates]},
            },
        }
    )


RESULTS = [
    result("none", (100, 90)),
    result("attention", (82, 85), digests="aa"),
    result("none", (100, 90), repeat=1, digests="ac"),
]


@pytest.mark.unit
def test_a_prediction_is_compared_on_the_rank_that_was_the_fullest() -> None:
    _, swapped, again = compare(RESULTS)
    assert swapped.freed_bytes == 15 * GIB, "of the highest peaks, of whatever rank"
    assert swapped.freed_of_predicted == 0.9, "of rank 0"
    assert again.freed_of_predicted is None
    row = next(row for row in summary(RESULTS) if row["mode"] == "attention")
    assert (row["gpus"], row["schedule"], row["freed_of_predicted"]) == (2, "GPipe", 0.9)


@pytest.mark.unit
def test_every_rank_and_every_link_has_a_row() -> None:
    first, second = rank_table(RESULTS)[-2:]
    assert "| 100.00 | 82.00 | 18.00 | 20.00 | 90.0% | 11.00 | 110.0% | 8, 1, 7 |" in first
    assert first.endswith("| 0 | 3 | yes | yes |")
    assert second.endswith("| 0 | 3 | no | no |")
    assert link_table(RESULTS)[-1] == "| all | 1 | 54.0 | 55.0 | 48.0 |"


@pytest.mark.unit
@pytest.mark.parametrize("gpus", PARTS)
def test_every_point_can_be_planned_and_has_a_page(gpus: int) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**THIRTY_BILLION)
    for part in PARTS[gpus]:
        assert part.run in RANK_RUNS
        for text in part.points:
            point = PipelinePoint.parse(text)
            assert str(point) == text
            plan = plan_point(
                point,
                config,
                shape="qwen3-30b-a3b",
                pp_size=part.pp_size,
                layers=part.layers,
                policy={},
            )
            assert max(rank.saved_bytes_at_peak for rank in plan.ranks) > GIB
            weights = {"weights": 28 * GIB, "vocabulary": 151_936}
            without, with_swap = (
                expected_peak(point, plan.ranks[-1], mode=mode, **weights)
                for mode in ("none", "attention")
            )
            assert 28 * GIB < with_swap < without


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    method = f"file://{tmp_path}/peers"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield Records(out=tmp_path, common={"run": "pipeline-2"}, until=time.time() + 60)
    dist.destroy_process_group()


@pytest.mark.unit
def test_what_ends_the_processes_leaves_a_record(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(KeyError), records.measurement("broken", {}):
        raise KeyError
    with pytest.raises(SystemExit), records.measurement("full", {}):
        # As torch's pipelining raises it.
        raise RuntimeError from torch.OutOfMemoryError()
    assert [records.outcome(name) for name in ("broken", "full", "next")] == [
        *("failed", "out of memory", None)
    ]


@pytest.mark.unit
def test_nothing_begins_that_would_not_end_in_time(records: Records) -> None:
    assert records.time_left()
    records.until = time.time()
    assert not records.time_left()


@pytest.mark.level0
def test_two_ranks_from_the_call_to_the_page(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    options = ["--gpus=2", f"--out={results}", "--device=cpu", "--shape=tiny", "--only=pipeline"]
    assert main([*options, "--points=1", "--steps=1", "--warmup=1"]) == 0
    records = [json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*.json"))]
    assert [record["mode"] for record in records] == ["none", "attention", "none"]
    none, attention, again = (record["figures"] for record in records)
    assert none["losses"] == attention["losses"] == again["losses"]
    assert none["gradient_digest"] == attention["gradient_digest"] == again["gradient_digest"]
    for own in attention["ranks"]:
        assert own["offloaded_bytes"] == own["reloaded_bytes"]
        assert own["offloaded_bytes"] == pytest.approx(own["planned"]["offloaded_bytes"], rel=0.1)
        assert own["reload_misses"] == 0
    assert none["offloaded_bytes"] == 0
    assert str(tmp_path) not in json.dumps(records), "no path of this machine"
    render([results], docs)
    page = (docs / "pipeline-2.md").read_text("utf-8")
    assert "| Interleaved1F1B | 2 |" in page
    assert "Rank by rank" in page
    rows: list[dict[str, Any]] = json.loads((docs / "summary.json").read_text("utf-8"))
    assert {row["gpus"] for row in rows} == {2}
    before = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert main([*options, "--points=1", "--steps=1", "--warmup=1"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
