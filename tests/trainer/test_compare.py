# SPDX-License-Identifier: Apache-2.0
"""The whole comparison, in its own processes, on real text."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from activation_swap.trainer import compare as command
from activation_swap.trainer.__main__ import main
from activation_swap.trainer.measure import Measurement, measure
from activation_swap.trainer.own_process import in_own_process

if TYPE_CHECKING:
    from activation_swap import Mode
    from activation_swap.trainer.config import Config

    from .conftest import MakeConfig

pytestmark = pytest.mark.level0

LAYERS = 3


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the demo's configuration with fewer layers and steps."""
    directory = tmp_path_factory.mktemp("compare")
    demo = yaml.safe_load((Path(__file__).parents[2] / "configs" / "demo.yaml").read_text())
    demo["output"] = str(directory)
    demo["device"] = "cpu"
    demo["model"]["overrides"] = {"num_hidden_layers": LAYERS}
    demo["compare"] = {"digest_steps": 2, "warmup_steps": 0, "timed_steps": 2}
    (directory / "run.yaml").write_text(yaml.safe_dump(demo))
    assert main(["compare", str(directory / "run.yaml")]) == 0
    return directory


@pytest.fixture
def report(output: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((output / "report.json").read_text())
    return data


def test_output_that_cannot_be_made_is_refused_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run.yaml").write_text(f"output: {tmp_path / 'file' / 'out'}\n")
    monkeypatch.delattr(command, "compare")
    assert main(["compare", str(tmp_path / "run.yaml")]) == 2
    assert capsys.readouterr().err.startswith("AS415")


def test_bits_are_equal(report: dict[str, Any]) -> None:
    assert report["losses_equal"] is True
    assert report["gradients_equal"] is True


def test_bytes_were_moved(report: dict[str, Any]) -> None:
    """Every layer but the last, which is needed first, moves the same bytes there and back."""
    none, attention = report["modes"]["none"], report["modes"]["attention"]
    per_layer = none["resident_saved_bytes_peak"] / LAYERS
    assert per_layer >= 1 << 20
    assert report["offloaded_bytes"] == attention["offloaded_bytes"] > 0
    assert attention["offloaded_bytes_per_step"] == (LAYERS - 1) * per_layer
    assert attention["reloaded_bytes"] == attention["offloaded_bytes"]
    assert attention["reload_misses"] == 0
    assert none["offloaded_bytes"] == 0


def test_memory_is_lower(report: dict[str, Any]) -> None:
    none, attention = report["modes"]["none"], report["modes"]["attention"]
    assert attention["resident_saved_bytes_peak"] < none["resident_saved_bytes_peak"]
    assert attention["peak_device_bytes"] == attention["resident_saved_bytes_peak"]
    assert attention["host_bytes_reserved"] > 0


def test_report_is_complete(output: Path, report: dict[str, Any]) -> None:
    assert len(report["modes"]["none"]["step_seconds"]["all"]) == 2
    assert report["link"] is None
    assert "| peak device memory |" in (output / "report.md").read_text()
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")


def measure_in_little_memory(config: Config, mode: Mode) -> Measurement:
    limit = 64 << 30  # the attention scores alone would be terabytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return measure(config, mode)


@pytest.mark.parametrize("mode", ["none", "attention"])
def test_memory_of_the_machine_that_does_not_suffice_is_a_result(
    mode: Mode, make_config: MakeConfig
) -> None:
    """As that of a device is."""
    model = {"attn_implementation": "eager", "overrides": {"num_hidden_layers": 1}}
    config = make_config(batch_size=1, sequence_length=10**6, model=model)
    assert in_own_process(measure_in_little_memory, config, mode).out_of_memory


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_stopped_comparison_leaves_no_process_and_no_report(
    number: signal.Signals, code: int, output: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "activation_swap.trainer", "compare", str(output / "run.yaml")]
    changes = ["--set", f"output={tmp_path / 'out'}", "--set", "compare.timed_steps=1000"]
    with subprocess.Popen([*command, *changes], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = psutil.Process(process.pid)
        while not any("spawn_main" in " ".join(c.cmdline()) for c in started.children()):
            assert process.poll() is None
            time.sleep(0.05)
        children = started.children()
        process.send_signal(number)
        assert process.stderr.read().endswith(f"stopped by {number.name}\n")
        assert process.wait(timeout=60) == code
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
