# SPDX-License-Identifier: Apache-2.0
"""The comparison on a real link: four layers of the 30B shape in bf16."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
import yaml

from activation_swap.trainer.__main__ import main
from activation_swap.trainer.link_probe import probe_link

pytestmark = [
    pytest.mark.level1,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]

LAYERS = 4


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("compare")
    run = {
        "output": str(output),
        "batch_size": 1,
        "sequence_length": 4096,
        "deterministic": True,
        "model": {
            "source": "qwen3-30b-a3b",
            "dtype": "bfloat16",
            "overrides": {"num_hidden_layers": LAYERS},
        },
        "optimizer": {"name": "sgd_in_backward"},
        "compare": {
            "digest_steps": 2,
            "warmup_steps": 1,
            "timed_steps": 3,
            "repeat_baseline": True,
        },
    }
    (output / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["compare", str(output / "run.yaml")]) == 0
    data: dict[str, Any] = json.loads((output / "report.json").read_text())
    return data


def test_bits_are_equal_where_the_baseline_repeats(report: dict[str, Any]) -> None:
    assert report["baseline_repeats"] is True
    assert report["losses_equal"] is True
    assert report["gradients_equal"] is True


def test_bytes_of_the_design_are_eligible(report: dict[str, Any]) -> None:
    """50,176 bytes per token and layer."""
    none, attention = report["modes"]["none"], report["modes"]["attention"]
    assert none["resident_saved_bytes_peak"] == LAYERS * 4096 * 50_176
    assert attention["saved_bytes"] == 3 * (LAYERS - 1) * 4096 * 50_176
    assert attention["reload_misses"] == 0


def test_device_memory_is_the_allocators(report: dict[str, Any]) -> None:
    none, attention = report["modes"]["none"], report["modes"]["attention"]
    assert none["peak_device_bytes"] > none["resident_saved_bytes_peak"]
    assert attention["peak_device_bytes"] < none["peak_device_bytes"]
    assert "allocator" in report["device_memory"]


def test_link_rates_are_in_bytes_per_second() -> None:
    """Of any link there is; how fast this one is depends on what else runs beside the test."""
    rates = probe_link("auto")
    assert rates is not None
    assert all(1e8 < rate < 1e12 for rate in asdict(rates).values())
