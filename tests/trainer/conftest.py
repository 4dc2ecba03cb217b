# SPDX-License-Identifier: Apache-2.0
"""What the trainer's tests share: a small run and the text it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from activation_swap.trainer.config import Config, parse_config

if TYPE_CHECKING:
    from pathlib import Path


class MakeConfig(Protocol):
    """Makes a configuration of a run that takes milliseconds per step."""

    def __call__(self, **values: Any) -> Config:
        """Replace top-level values."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    for name in "abc":
        (directory / f"{name}.txt").write_text(f"{name} reads a line of text.\n" * 40, "utf-8")
    return directory


@pytest.fixture
def make_config(tmp_path: Path, text: Path) -> MakeConfig:
    def make(**values: Any) -> Config:
        run = {
            "device": "cpu",
            "cpu_threads": 1,
            "batch_size": 2,
            "sequence_length": 24,
            "steps": 4,
            "output": str(tmp_path / "out"),
            "model": {
                "overrides": {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 8}
            },
            "data": {"files": [str(text / "*.txt")]},
        }
        return parse_config({**run, **values})

    return make
