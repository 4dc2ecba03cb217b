# SPDX-License-Identifier: Apache-2.0
"""Storages that live longer than the graph: moving them frees nothing, so that they stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.packed_tensor import KeptTensor
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.core.chain import Chain, install_chain
from tests.models import build, forward, swapped, tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.level0

POLICY = SwapPolicy(min_bytes=1, slab_bytes=4096, min_coverage=0.0)
WIDTH = 8
HIDDEN = torch.ones(2, 4, WIDTH, requires_grad=True)


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_detached_weight_stays(moved: set[int]) -> None:
    chain = Chain(width=WIDTH)
    for module in chain.attentions:
        module.inner = lambda hidden, module=module: hidden @ module.proj.weight.detach()
    install_chain(chain, POLICY)
    chain(HIDDEN)
    assert moved
    assert not moved & addresses_of(chain.parameters())


def test_a_buffer_stays(moved: set[int]) -> None:
    chain = Chain(width=WIDTH)
    for module in chain.attentions:
        module.register_buffer("scale", torch.full((WIDTH,), 2.0))
        module.inner = lambda hidden, module=module: hidden * module.scale
    swap = install_chain(chain, POLICY)
    chain(HIDDEN)
    assert moved
    assert not moved & addresses_of(chain.buffers())
    kept = swap.stats().kept_bytes[KeepReason.PARAMETER]
    assert kept == sum(m.proj.weight.nbytes + m.scale.nbytes for m in chain.attentions)


@pytest.mark.parametrize("detached", [False, True], ids=["with-gradient", "without"])
def test_functional_call_moves_no_weight(moved: set[int], *, detached: bool) -> None:
    """The weights are tensors of the caller's then, and no parameters."""
    model = build()
    ids = tokens(model)
    weights = {
        name: p.detach().clone().requires_grad_(not detached or "self_attn" not in name)
        for name, p in model.named_parameters()
    }
    with swapped(model, POLICY):
        torch.func.functional_call(
            model, weights, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}
        )
        forward(model, ids)
    assert moved
    assert not moved & addresses_of(weights.values())


@pytest.mark.parametrize("half_first", [True, False], ids=["half-first", "whole-first"])
def test_a_storage_is_kept_or_moved_and_never_both(moved: set[int], *, half_first: bool) -> None:
    """What holds a half holds the whole: moving the whole as well would free nothing."""
    chain = Chain(width=WIDTH)
    shared: list[torch.Tensor] = []

    def inner(hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden * 1.0
        shared.append(mixed)
        if half_first:
            return mixed[:1].cos().sum() * mixed.sin()
        return mixed.sin() * mixed[:1].cos().sum()

    for module in chain.attentions:
        module.inner = inner
    swap = install_chain(chain, SwapPolicy(min_bytes=1, slab_bytes=4096, min_coverage=0.9))
    loss = chain(HIDDEN)
    partial = swap.stats().kept_bytes.get(KeepReason.PARTIAL_VIEW, 0)
    held = addresses_of(shared)
    if half_first:
        assert not moved & held
        assert partial == sum(mixed.nbytes for mixed in shared)
    else:
        assert len(moved & held) == len(shared) - 1, "the last one stays"
        assert partial == 0
    loss.backward()


@pytest.mark.parametrize("freed", [True, False])
def test_what_takes_the_place_of_a_freed_weight_moves(moved: set[int], *, freed: bool) -> None:
    """FSDP2 frees a gathered weight in the middle of an attention, and its address is reused."""
    chain = Chain(width=WIDTH)
    places: list[int] = []

    def inner(value: torch.Tensor) -> torch.Tensor:
        result = value.sin()
        weight = torch.zeros_like(result)
        if freed:
            weight.untyped_storage().resize_(0)
        hooks = top_saved_tensor_hooks()
        assert hooks is not None
        recorder = hooks[0].__self__  # type: ignore[attr-defined]
        # As if the weight had been there before: no allocator can be asked for an address.
        places.append(result.untyped_storage().data_ptr())
        recorder._kept[places[0]] = KeptTensor(("weight", weight, weight._version))
        return result * result

    chain.attentions[0].inner = inner
    install_chain(chain, POLICY)
    loss = chain(HIDDEN)
    assert (places[0] in moved) is freed
    del loss
