# SPDX-License-Identifier: Apache-2.0
"""What the combinations are checked with finds what it is there to find."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapPolicy
from activation_swap.core.engine import Engine
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.recorder import Recorder
from tests.compose.run import EVERYTHING, Run, compare
from tests.compose.tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.level0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(run: Run, *, policy: SwapPolicy = EVERYTHING) -> None:
    model = tiny_model()
    run.apply(model, policy)
    run.train(model)


def test_nothing_is_found_in_a_sound_swap() -> None:
    figures = compare(train, memory=True)
    assert 0 < figures["saved_bytes"] < figures["attention_bytes"]


def test_a_changed_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    reload = HostTransfer.reload

    def change_one_bit(self: HostTransfer, moves: Any, **options: Any) -> Any:
        fence = reload(self, moves, **options)
        device, _ = moves[0]
        device.view(torch.uint8)[0] ^= 1
        return fence

    monkeypatch.setattr(HostTransfer, "reload", change_one_bit)
    with pytest.raises(AssertionError, match="self_attn"):
        compare(train)


def test_a_weight_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_is_parameter", lambda *_: False)
    monkeypatch.setattr(Recorder, "_owner_elsewhere", lambda *_: None)
    with pytest.raises(AssertionError, match="weights moved"):
        compare(train)


def test_a_storage_that_does_not_move() -> None:
    policy = SwapPolicy(min_bytes=4000, slab_bytes=2**20)
    with pytest.raises(AssertionError, match="small"):
        compare(partial(train, policy=policy))


def test_memory_that_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    seal = Engine.seal

    def hold(self: Engine, group: Any, storages: Any, **options: Any) -> None:
        held.extend(alias for storage in storages for alias, _ in storage.aliases)
        seal(self, group, storages, **options)

    monkeypatch.setattr(Engine, "seal", hold)
    with pytest.raises(AssertionError):
        compare(train, memory=True)
    compare(train)
