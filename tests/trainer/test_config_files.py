# SPDX-License-Identifier: Apache-2.0
"""The files of ``configs/``."""

from __future__ import annotations

from pathlib import Path

import pytest

from activation_swap.trainer.config import load_config

pytestmark = pytest.mark.unit

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_swaps_and_compares_bits_that_repeat(path: Path) -> None:
    config = load_config(path)
    assert config.activation_swap == "attention"
    # One CPU thread repeats its own bits; a GPU has to be told.
    assert config.deterministic or config.cpu_threads == 1
