# SPDX-License-Identifier: Apache-2.0
"""The device of a run: which one, and its determinism."""

from __future__ import annotations

import pytest
import torch

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.device import determinism, resolve_device

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


@pytest.mark.parametrize(
    "name", ["", "cpu:x", "cuda:x", "cuda:2", "cuda:999", "tpu", "meta", "xpu:0"]
)
def test_a_device_that_is_not_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two of them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)

    with pytest.raises(RejectedError) as refusal:
        resolve_device(name)

    assert refusal.value.reason is Reason.DEVICE_UNAVAILABLE
    assert refusal.value.found == f"device: {name!r}"
    assert refusal.value.expected == "auto | cpu | cuda:0 | cuda:1"
    for here in ("cpu", "cuda", "cuda:1"):
        assert resolve_device(here) == torch.device(here)
    assert resolve_device("auto") == torch.device("cuda")
