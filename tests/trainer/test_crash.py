# SPDX-License-Identifier: Apache-2.0
"""Real processes, killed with SIGKILL at random moments."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from activation_swap.trainer.checkpoint import CheckpointStore
from activation_swap.trainer.metrics import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.level0

STEPS = 30
# One thread each: the processes are many and small.
PYTHON = ["env", "OMP_NUM_THREADS=1", sys.executable]

# Saves one checkpoint after the other: eight files that all hold the step.
WRITER = """
import sys
from pathlib import Path
from activation_swap.trainer.checkpoint import CheckpointStore

def write(directory):
    for index in range(8):
        with open(directory / f"{index}.txt", "w") as file:
            for _ in range(200):
                file.write(f"{step}\\n")
                file.flush()

store = CheckpointStore(Path(sys.argv[1]), keep=2)
done = [int(path.name.removeprefix("step-")) for path in store.complete()]
step = max(done, default=0)
print("ready", flush=True)
while True:
    step += 1
    store.save(step, write)
"""


def newest_step(directory: Path) -> int:
    """Return the newest step, after checking that every visible checkpoint is whole."""
    checkpoints = CheckpointStore(directory, keep=2).complete()
    for path in checkpoints:
        step = int(path.name.removeprefix("step-"))
        for index in range(8):
            assert (path / f"{index}.txt").read_text() == f"{step}\n" * 200
    return max((int(path.name.removeprefix("step-")) for path in checkpoints), default=0)


def test_killed_writer_leaves_whole_checkpoints(tmp_path: Path) -> None:
    moments = random.Random(0)  # noqa: S311 - not for security
    reached, unfinished = 0, 0
    for _ in range(6):
        process = subprocess.Popen([*PYTHON, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.05, 0.4))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        step = newest_step(tmp_path)
        assert step > reached, "no progress, or a checkpoint was lost"
        reached = step
        unfinished += any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert unfinished, "no kill fell into a save: the test shows nothing"


def trainer_command(config: Path, *arguments: str) -> list[str]:
    module = "activation_swap.trainer"
    return [*PYTHON, "-m", module, "train", str(config), *arguments]


def run_config(directory: Path, text: Path) -> Path:
    run: dict[str, Any] = {
        "device": "cpu",
        "cpu_threads": 1,
        "batch_size": 1,
        "sequence_length": 512,
        "steps": STEPS,
        "activation_swap": "attention",
        "output": str(directory / "out"),
        "model": {"overrides": {"num_hidden_layers": 2, "hidden_size": 64}},
        "data": {"files": [str(text / "*.txt")]},
        "checkpoint": {"every": 1},
    }
    directory.mkdir()
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def outcome(directory: Path) -> tuple[list[float], bytes, dict[str, Any]]:
    newest = CheckpointStore(directory / "out" / "checkpoints", keep=2).complete()[-1]
    metrics = list(read_metrics(directory / "out" / "metrics.jsonl"))
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["offloaded_bytes"] > 0 for line in metrics)
    return (
        [line["loss"] for line in metrics],
        (newest / "model.safetensors").read_bytes(),
        json.loads((newest / "state.json").read_text()),
    )


def test_killed_and_resumed_run_gives_the_same_bits(tmp_path: Path, text: Path) -> None:
    whole = run_config(tmp_path / "whole", text)
    subprocess.run(trainer_command(whole), check=True, capture_output=True, timeout=120)
    killed = run_config(tmp_path / "killed", text)
    moments = random.Random(1)  # noqa: S311 - not for security
    metrics = tmp_path / "killed" / "out" / "metrics.jsonl"
    kills = 0
    while kills < 2:
        process = subprocess.Popen(
            trainer_command(killed, "--resume"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = metrics.stat().st_size if metrics.exists() else 0
        with process:
            while process.poll() is None and not _grew(metrics, before):
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.15))
            assert process.poll() is None, "the run ended before it was killed"
            process.send_signal(signal.SIGKILL)
        kills += 1
    subprocess.run(
        trainer_command(killed, "--resume"), check=True, capture_output=True, timeout=120
    )
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def _grew(path: Path, before: int) -> bool:
    """Whether a step of this process is in the file: a start may shorten it first."""
    if not path.exists():
        return False
    size = path.stat().st_size
    return size > before
