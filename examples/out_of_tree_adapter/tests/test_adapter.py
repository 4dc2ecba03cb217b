# SPDX-License-Identifier: Apache-2.0
"""The adapter, installed: found by its entry point, and true to its contract."""

from __future__ import annotations

import pytest
import torch
from pebble.adapter import adapter
from pebble.model import Pebble, loss_of
from torch import nn

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.errors import RejectedError
from activation_swap.testing import check_adapter

TOKENS = torch.arange(48).reshape(2, 24) % 64


def loss(model: nn.Module) -> torch.Tensor:
    return loss_of(model, TOKENS)


def test_it_keeps_its_contract() -> None:
    check_adapter(adapter, Pebble, loss)


def test_the_installed_entry_point_serves_the_class() -> None:
    model = Pebble()

    swap = registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    loss(model).backward()

    assert swap.stats().offloaded_bytes > 0


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", Pebble(), setup=TrainingSetup(pp_size=2))

    assert refusal.value.found == "pp_size=2"
