# SPDX-License-Identifier: Apache-2.0
"""The reference trainer under torchrun: pipeline parallelism, alone and with FSDP2."""

from __future__ import annotations

import json
import sys
from subprocess import run
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from activation_swap.trainer.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.level0

CONFIG: dict[str, Any] = {
    "activation_swap": "attention",
    "pp_size": 2,
    "microbatches": 2,
    "batch_size": 1,
    "sequence_length": 2048,
    "steps": 2,
    "device": "cpu",
    "cpu_threads": 1,
    "model": {
        "source": "tiny",
        "overrides": {
            "num_hidden_layers": 6,
            "hidden_size": 128,
            "moe_intermediate_size": 16,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
    },
    "compare": {
        "digest_steps": 1,
        "warmup_steps": 0,
        "timed_steps": 1,
        "repeat_baseline": True,
    },
}


def torchrun(
    directory: Path, processes: int, command: str, *, returncode: int = 0, **changes: Any
) -> str:
    """Return what the processes wrote to stderr."""
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "output": str(directory), **changes}))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    arguments = ["-m", "activation_swap.trainer", command, str(config)]
    done = run([sys.executable, *launcher, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == returncode, done.stderr[-4000:]
    return done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        pytest.param(2, {}, id="1F1B"),
        pytest.param(4, {}, id="1F1B with FSDP2"),
        pytest.param(
            2,
            {"schedule": "ZBVZeroBubble", "microbatches": 3},
            id="ZBV",
        ),
    ],
)
def test_compare(processes: int, changes: dict[str, Any], tmp_path: Path) -> None:
    torchrun(tmp_path, processes, "compare", **changes)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses_equal"]
    assert report["gradients_equal"]
    assert report["baseline_repeats"]
    assert [rank["rank"] for rank in report["ranks"]] == list(range(processes))
    for rank in report["ranks"]:
        assert rank["gradients"] > 0
        assert rank["reloaded_bytes"] == rank["offloaded_bytes"]
        assert rank["reload_misses"] == 0
    assert sum(rank["offloaded_bytes"] for rank in report["ranks"]) > 0


@pytest.mark.timeout(600)
def test_train(tmp_path: Path) -> None:
    torchrun(tmp_path, 2, "train")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["offloaded_bytes"] > 0 for record in records)
    assert "AS408" in torchrun(tmp_path, 2, "train", returncode=1)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_output_that_cannot_be_written_to_is_refused_by_every_rank(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").mkdir()
    assert torchrun(tmp_path, 2, command, returncode=1).count("AS415") == 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_several_processes_without_a_pipeline_are_refused(command: str, tmp_path: Path) -> None:
    one = {"pp_size": 1, "microbatches": 1}
    told = torchrun(tmp_path, 2, command, returncode=1, **one)
    assert "AS412" in told
    assert "start it without torchrun" in told
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_without_torchrun_it_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    assert main([command, str(config)]) == 2
    assert "AS412" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pp_size": 1}, "microbatches above 1 needs pp_size above 1"),
        ({"gradient_accumulation": 2}, "needs gradient_accumulation: 1"),
        ({"optimizer": {"name": "sgd_in_backward"}}, "needs optimizer.name: adamw"),
        ({"checkpoint": {"every": 1}}, "checkpoint.every needs pp_size: 1"),
    ],
)
def test_what_a_pipeline_does_not_support(
    changes: dict[str, Any], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, **changes}))
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert "AS401" in error
    assert part in error
