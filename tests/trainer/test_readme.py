# SPDX-License-Identifier: Apache-2.0
"""What the README shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from activation_swap.trainer.config import parse_config

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return str(found)


@pytest.mark.level0
def test_example_runs_and_moves_something(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    namespace: dict[str, Any] = {}
    exec(block("python"), namespace)  # noqa: S102 - the README is ours
    torch.set_num_threads(threads)
    assert int(capsys.readouterr().out) > 3 << 20
    namespace["swap"].remove()


@pytest.mark.unit
def test_yaml_parses() -> None:
    config = parse_config(yaml.safe_load(block("yaml")))
    assert config.activation_swap == "attention"
    assert config.optimizer.lr == 1e-4


@pytest.mark.unit
def test_example_is_short() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 12


@pytest.mark.unit
def test_commands_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    commands = re.findall(r"make ([a-z-]+)", README)
    assert {"demo", "test", "gpu-test"} <= set(commands)
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
