# SPDX-License-Identifier: Apache-2.0
"""A saved tensor changes in place at every moment: an error by name, or the value at save time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.link import Links, transfer_for
from activation_swap.errors import InPlaceChangeError
from tests.core.chain import Chain, install_chain
from tests.faults.harness import Stalled, at_base, next_backward
from tests.models import build, forward, install, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from activation_swap.core.install import InstalledSwap

pytestmark = pytest.mark.usefixtures("exact")

MOMENTS = ("at once", "in the attention", "after it", "after the next", "before backward")
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda tensor: tensor.mul_(3),
    "copy_": lambda tensor: tensor.copy_(torch.full_like(tensor, 5.0)),
    "view": lambda tensor: tensor[1:].add_(1),
    "detached": lambda tensor: tensor.detach().zero_(),
    "out=": lambda tensor: torch.sin(torch.ones_like(tensor), out=tensor.detach()),
    "set item": lambda tensor: tensor.__setitem__(0, 9.0),
}


WRAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    # Versions of a wrapper are its own: no inner tensor's changes with it.
    "wrapper": lambda tensor: TwoTensor(tensor, tensor.clone()),
}


class Keeper(torch.autograd.Function):
    """Saves one tensor, and gives what comes back to ``sink``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, sink: Any) -> torch.Tensor:
        ctx.sink = sink
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        saved = ctx.saved_tensors[0]
        ctx.sink += [saved.a, saved.b] if isinstance(saved, TwoTensor) else [saved.clone()]
        return grads[0], None, None


def links(device: torch.device) -> Links:
    """Return links whose D2H copies take long, so that a change falls into them."""
    make = transfer_for if device.type == "cpu" else Stalled
    return Links(SwapPolicy(min_bytes=1), make_transfer=make)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_never_a_third_value(
    device: torch.device, layer: int, moment: str, wrap: str, record_property: Any
) -> None:
    """Until the next attention has ended the data is on the device; the last layer's stays."""
    on_device = layer == 2 or moment in MOMENTS[:3]
    names = CHANGES if wrap == "plain" else ("mul_", "detached")
    for name in names:
        for no_grad in (False, True):
            kept = WRAPS[wrap](torch.arange(4096.0, device=device).reshape(64, 64))
            swap = change_once(layer, moment, CHANGES[name], kept, no_grad=no_grad, fails=on_device)
            assert at_base(swap)
    record_property("changes", 2 * len(names))


def change_once(
    layer: int,
    moment: str,
    change: Callable[[torch.Tensor], Any],
    kept: torch.Tensor,
    *,
    no_grad: bool,
    fails: bool,
) -> InstalledSwap:
    device = kept.device
    chain = Chain(layers=3, width=64).to(device)
    swap = install_chain(chain, SwapPolicy(min_bytes=1), links=links(device))
    sink: list[torch.Tensor] = []
    value = torch.arange(4096.0, device=device).reshape(64, 64)
    done: list[str] = []

    def disturb(now: str) -> None:
        if moment == now and not done:
            done.append(now)
            with torch.set_grad_enabled(not no_grad):
                change(kept)

    def inner(mixed: torch.Tensor) -> torch.Tensor:
        mixed = Keeper.apply(mixed, kept, sink)
        disturb("at once")
        mixed = mixed.tanh()
        disturb("in the attention")
        return mixed

    def between(index: int, hidden: torch.Tensor) -> torch.Tensor:
        if index == layer:
            disturb("after it")
        if index == min(layer + 1, 2):
            disturb("after the next")
        return hidden

    chain.attentions[layer].inner = inner
    chain.between = between
    hidden = torch.ones(4, 64, device=device, requires_grad=True)
    loss = chain(hidden)
    disturb("before backward")
    assert done
    if fails:
        with pytest.raises(
            InPlaceChangeError, match=r"changed in place(.|\n)*float32\[64, 64\]"
        ) as e:
            loss.backward()
        assert e.value.where == f"attentions.{layer}"
        # The frames of the traceback hold the graph.
        e.value.__traceback__ = None
    else:
        loss.backward()
        assert all(torch.equal(back, value) for back in sink)
    return swap


@pytest.mark.level0
@pytest.mark.parametrize("place", ["q_proj", "v_proj", "o_proj"])
def test_the_real_model_names_the_attention(place: str) -> None:
    """An in-place change of what a projection saves, as plain autograd would refuse it."""
    model, plain = build(), build()
    for one in (plain, model):
        one.model.layers[1].self_attn.get_submodule(place).register_forward_hook(
            lambda _, args, __: [args[0].detach().mul_(2)][1:] or None
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward(plain, tokens(plain)).loss.backward()
    swap = install(model)
    loss = forward(model, tokens(model)).loss
    with pytest.raises(InPlaceChangeError, match=r"model\.layers\.1\.self_attn"):
        loss.backward()
    del loss
    next_backward()
    assert at_base(swap)


@pytest.mark.level0
def test_a_changed_storage_stays_and_is_counted() -> None:
    chain = Chain()
    swap = install_chain(chain)
    kept: list[torch.Tensor] = []

    def inner(mixed: torch.Tensor) -> torch.Tensor:
        kept.append(mixed)
        return mixed.sin()

    chain.attentions[0].inner = inner
    loss = chain(torch.ones(5, 8, requires_grad=True))
    assert swap.stats().kept_bytes.get(KeepReason.CHANGED, 0) == 0
    del loss
    chain.between = lambda index, hidden: (index == 0 and kept[-1].detach().add_(1), hidden)[1]
    loss = chain(torch.ones(5, 8, requires_grad=True))
    assert swap.stats().kept_bytes[KeepReason.CHANGED] == kept[-1].nbytes
    del loss
    kept.clear()
    assert at_base(swap)
