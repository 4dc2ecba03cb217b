# SPDX-License-Identifier: Apache-2.0
"""Storages that live longer than the graph: moving them frees nothing, so that they stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy
from tests.core.chain import Chain, equal, install_chain, run
from tests.models import build, forward, swapped, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.level0

POLICY = SwapPolicy(min_bytes=1, slab_bytes=4096, min_coverage=0.0)
WIDTH = 8
HIDDEN = torch.ones(2, 4, WIDTH, requires_grad=True)


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def twins(inner: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Chain, Chain]:
    """Return two equal chains with ``inner`` in the middle of each attention."""
    chains = Chain(width=WIDTH), Chain(width=WIDTH)
    for chain in chains:
        for module in chain.attentions:
            module.inner = inner
    return chains


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


def test_a_storage_that_was_resized_stays(moved: set[int]) -> None:
    """Freed after its save, as FSDP2 frees weights, and filled again for its backward.

    A copy would read what is gone. What takes its address meanwhile moves as ever.
    """
    values = torch.linspace(0.5, 2.0, HIDDEN.numel()).view_as(HIDDEN)
    gathered: list[torch.Tensor] = []

    def gather(weight: torch.Tensor) -> None:
        weight.untyped_storage().resize_(values.nbytes)
        with torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
            weight.copy_(values)

    def inner(value: torch.Tensor) -> torch.Tensor:
        weight = values.clone()
        scaled = value * weight
        scaled.register_hook(lambda _: gather(weight))
        weight.untyped_storage().resize_(0)
        gathered.append(weight)
        result = scaled.sin()
        return result * result

    plain, chain = twins(inner)
    expected = run(plain, HIDDEN)
    swap = install_chain(chain, POLICY)
    assert equal(run(chain, HIDDEN), expected)
    assert len(gathered) == 2 * len(chain.attentions)
    # The input, what `exp` and `sin` put out, what `sin` took, and the two factors at the end.
    assert swap.stats().offloaded_storages == 2 * 6
    assert swap.stats().kept_bytes[KeepReason.CHANGED] == 3 * values.nbytes
    assert moved
    assert 0 not in moved


def test_a_place_is_no_identity() -> None:
    """Of two storages in one place, one may be gone before the other comes."""
    memory = bytearray(HIDDEN.numel() * 4)

    def inner(value: torch.Tensor) -> torch.Tensor:
        one, other = (
            torch.frombuffer(memory, dtype=torch.float32).view_as(value) for _ in range(2)
        )
        one.fill_(0.5)
        return value * one + value.sin() * other

    plain, chain = twins(inner)
    expected = run(plain, HIDDEN)
    swap = install_chain(chain, POLICY)
    assert equal(run(chain, HIDDEN), expected)
    # The input, what `exp` put out, the two of one place, the two factors at the end.
    assert swap.stats().offloaded_storages == 2 * 6


class _ReplacesItsSaves(torch.autograd.Function):
    """Frees what it saved by giving it other data, as Megatron-LM does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        saves = [torch.full_like(value, 0.5) for _ in range(8)]
        ctx.save_for_backward(*saves)
        return value * saves[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        saves = ctx.saved_tensors
        result: torch.Tensor = gradient * saves[0]
        for tensor in saves:
            tensor.data = torch.zeros_like(tensor)
        return result


def test_an_attention_that_frees_what_it_has_unpacked_itself() -> None:
    """The storage is gone then, and what is made next may be where it was."""

    def inner(value: torch.Tensor) -> torch.Tensor:
        leaf = value.detach().sin().requires_grad_()
        (gradient,) = torch.autograd.grad(_ReplacesItsSaves.apply(leaf).sum(), leaf)
        factors = [torch.full_like(value, float(number)) for number in range(1, 41)]
        found = torch.zeros_like(value)
        for factor in factors:
            found = found + value * factor * 1e-3
        return found * gradient

    plain, chain = twins(inner)
    expected = run(plain, HIDDEN)
    install_chain(chain, POLICY)
    for _ in range(3):
        assert equal(run(chain, HIDDEN), expected)
