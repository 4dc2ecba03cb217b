# SPDX-License-Identifier: Apache-2.0
"""The determinism of a run."""

from __future__ import annotations

import pytest
import torch

from activation_swap.trainer.device import determinism

pytestmark = pytest.mark.unit


def test_determinism_is_strict_and_ends_with_the_block() -> None:
    """As a warning only, flash attention's backward stays nondeterministic: torch checks both."""
    with determinism(enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_nothing_changes_when_it_is_not_asked_for() -> None:
    with determinism(enabled=False):
        assert not torch.are_deterministic_algorithms_enabled()
