# SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks from end to end, on a CPU and a shape too small to time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from activation_swap import SwapPolicy
from benchmarks import stage
from benchmarks.__main__ import main
from benchmarks.modes import MODES
from benchmarks.pages import render
from benchmarks.runs import RUNS, SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.level0,
    # The GPU machine's Transformers has no other name for it.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated"),
]

TINY = (
    *("--device", "cpu", "--shape", "tiny", "--layers", "2", "--tokens", "32"),
    *("--steps", "2", "--warmup", "1", "--policy", '{"min_bytes": 1024}'),
)
SUMMARY_KEYS = {
    *("name", "mode", "tokens", "gpus", "step_time_ratio", "peak_bytes_none", "peak_bytes"),
    *("eligible_bytes", "freed_fraction", "date", "torch", "transformers"),
}


@pytest.fixture(scope="module", autouse=True)
def same_threads() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every process of ``peers`` in this process, which has torch imported already."""
    folder = tmp_path_factory.mktemp("results")
    for number in range(len(RUNS["peers"].processes)):
        assert main(["process", "peers", str(number), "--out", str(folder), *TINY]) == 0
    return folder


def read(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return {record["mode"]: record for record in records}


def test_list_names_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*RUNS, *SCRIPTS]


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_of_known_modes_and_cuts_layers_only(name: str) -> None:
    for process in RUNS[name].processes:
        assert process.mode in MODES
        layers = [point.layers for point in process.points if point.layers is not None]
        assert layers == sorted(layers, reverse=True)


def test_what_runs_is_equal_to_none_and_what_cannot_says_why(results: Path) -> None:
    records = read(results)
    assert all(record["update"] is True for record in records.values())
    figures = {mode: record["figures"] for mode, record in records.items() if "figures" in record}
    assert set(figures) == {"none", "attention", "save_on_cpu", "checkpointing"}
    for mode, known in figures.items():
        assert known["losses"] == figures["none"]["losses"], mode
        assert known["gradient_digest"] == figures["none"]["gradient_digest"], mode
        assert len(known["step_ms_all"]) == 2
    assert figures["attention"]["eligible_bytes"] > 0
    assert figures["attention"]["saved_bytes"] == figures["attention"]["eligible_bytes"]
    assert figures["attention"]["reload_misses"] == 0
    for mode in set(records) - set(figures):
        assert records[mode]["outcome"] == "not run"
        assert "needs CUDA" in records[mode]["reason"]


def test_render_makes_pages_and_a_summary(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render([results], tmp_path)
    page = (tmp_path / "peers.md").read_text(encoding="utf-8")
    for stated in ("torch 2", "transformers", "Python 3", "warm-up", "date: 20", "| attention |"):
        assert stated in page
    rows = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert {row["mode"] for row in rows} == {"none", "attention", "save_on_cpu", "checkpointing"}
    assert all(row.keys() >= SUMMARY_KEYS for row in rows)
    before = page
    monkeypatch.chdir(tmp_path)
    render([Path("results")], tmp_path)  # the folder of what it kept, by another name
    assert (tmp_path / "peers.md").read_text(encoding="utf-8") == before, "from what it kept"


def test_run_starts_a_process_for_each_mode(tmp_path: Path) -> None:
    assert main(["run", "peers", "--modes", "none", "--out", str(tmp_path), *TINY]) == 0
    record = read(tmp_path)["none"]
    assert record["outcome"] == "measured"
    assert record["command"].startswith("python -m benchmarks run peers")
    assert str(tmp_path) not in json.dumps(record), "no path of this machine"


def test_a_process_that_fails_is_recorded(tmp_path: Path) -> None:
    options = ("--modes", "none", "--timeout", "0.01", "--out", str(tmp_path))
    assert main(["run", "peers", *options, *TINY]) == 1
    assert read(tmp_path)["none"]["outcome"] == "failed"


def test_a_stage_is_measured_on_the_device_that_is_asked_for() -> None:
    work = {"tokens": 64, "layers": 2, "microbatches": 4, "steps": 1, "warmup": 1}
    none, swapped = (
        stage.measure(mode, **work, device="cpu", shape="tiny", policy=SwapPolicy(min_bytes=1024))
        for mode in ("none", "attention")
    )
    assert swapped["gradient_digest"] == none["gradient_digest"]
    assert swapped["reloaded_bytes"] == swapped["offloaded_bytes"] > 0
    assert none["offloaded_bytes"] == 0
    assert swapped["machine"]["gpu"] is None
