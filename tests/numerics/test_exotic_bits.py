# SPDX-License-Identifier: Apache-2.0
"""Bits that arithmetic would not keep: they cross the link unchanged, narrowed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from activation_swap import SwapPolicy
from activation_swap._site import Site
from activation_swap.core.install import install
from activation_swap.core.narrowing import is_upcast, upper_halves
from activation_swap.core.swap_plan import SwapPlan

# Infinities, quiet and signalling NaNs with payloads, the smallest denormals, negative zero.
PATTERNS = (0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x8001, 0x8000)


class _Saves(torch.autograd.Function):
    """Saves its input and gives it to ``sink`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sink: list[torch.Tensor]) -> torch.Tensor:
        ctx.sink = sink
        ctx.save_for_backward(x)
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sink.extend(ctx.saved_tensors)
        return gradients[0], None


class _Unversioned(torch.autograd.Function):
    """Returns a view of its input that it has written to, with no version to tell of it.

    As a collective does that reduces in place, or a kernel that is given an address.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - protocol
        x.data.mul_(1 / 3)
        return x.view(4)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - protocol
        return gradients[0]


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor, sink: list[torch.Tensor]) -> torch.Tensor:
        return _Saves.apply(x.clone().float(), sink)  # a clone keeps every bit


@pytest.mark.parametrize("narrows", [True, False], ids=["narrow", "wide"])
def test_exotic_bits_survive(device: torch.device, *, narrows: bool) -> None:
    bits = torch.tensor(PATTERNS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits.to(device).requires_grad_()
    sites = tuple(Site(fqn=f"attention.{n}", module=_Attention()) for n in range(2))
    policy = SwapPolicy(min_bytes=1, narrow=narrows)
    swap = install(SwapPlan(sites=sites, policy=policy))
    sink: list[torch.Tensor] = []
    first = sites[0].module(x, sink)
    sites[1].module(x, [])  # its end releases the first group
    first.sum().backward()
    stats = swap.stats()
    itemsize = 2 if narrows else 4
    assert stats.reloaded_bytes == itemsize * len(PATTERNS)
    assert stats.saved_bytes == 4 * len(PATTERNS)
    (saved,) = sink
    assert saved.view(torch.int32).tolist() == bits.float().view(torch.int32).tolist()


@pytest.mark.unit
def test_every_bf16_value_survives_narrowing() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = every.float()
    back = torch.empty_like(wide)
    back.copy_(upper_halves(wide))
    assert torch.equal(back.view(torch.int32), wide.view(torch.int32))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "proven"),
    [
        (lambda x: x.float(), True),
        (lambda x: x.to(torch.float32), True),
        (lambda x: x.float() * 1, False),
        (lambda x: x.float().add_(1), False),
        (lambda x: x.half().float(), False),
        (lambda x: x.double(), False),
        (lambda x: x.float().detach(), False),
        # A linear layer of three dimensions saves its input flattened, as LoRA's does.
        (lambda x: x.float().view(2, 2), True),
        (lambda x: x.float().view(2, 2).t(), False),
        (lambda x: _Unversioned.apply(x.float()), False),
        (lambda x: _Unversioned.apply(x.float()).view(2, 2), False),
        (lambda x: x.float()[:2], False),
        (lambda x: x.float().expand(2, 4), False),
        (lambda x: (x.float().view(2, 2).add_(1)).view(4), False),
        (lambda x: (x.float() * 1).view(2, 2), False),
        (lambda x: x.view(torch.float32), False),
        (lambda x: x, False),
    ],
    ids=[
        "float",
        "to",
        "times",
        "in-place",
        "fp16",
        "fp64",
        "detached",
        "view",
        "transposed",
        "function",
        "view of a function",
        "part",
        "expanded",
        "changed",
        "product",
        "bits",
        "bf16",
    ],
)
def test_only_a_proven_upcast_is_narrowed(make: Any, *, proven: bool) -> None:
    x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True) * 1
    assert is_upcast(make(x)) is proven


class _Calls(nn.Module):
    """An attention that is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x)
        return result


def _negative(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    negative = torch._neg_view(hidden)
    return hidden.exp() * hidden + negative * negative


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    squared = hidden * hidden
    pairs = torch.view_as_complex(hidden.view(8, 8, 2))
    others = torch.view_as_complex(hidden.sin().view(8, 8, 2))
    return squared + torch.view_as_real(pairs.conj() * others).reshape(8, 16)


def _imaginary(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    imaginary = torch.view_as_complex(hidden.view(8, 8, 2)).conj().imag
    return hidden * hidden + (imaginary * imaginary).sum()


def _reinterpreted(x: torch.Tensor) -> torch.Tensor:
    odd = torch.cat([x.flatten(), x.flatten()[:1]]).bfloat16()
    pairs = odd[:-1].detach().view(torch.float32)
    return x * (odd * odd).float().sum() + (x.flatten()[:64] * pairs).sum()


def _thin(x: torch.Tensor) -> torch.Tensor:
    upcast = (x.bfloat16() * 1).flatten().as_strided((128, 1), (1, 7)).float()
    return x * (upcast * upcast).sum()


@pytest.mark.level0
@pytest.mark.parametrize(
    "function", [_negative, _conjugate, _imaginary, _reinterpreted, _thin], ids=lambda f: f.__name__
)
def test_views_of_a_storage_that_moves(function: Any) -> None:
    """Lazy bits, other dtypes and strides that nobody writes: gradients as without the swap."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def gradient(*, swapped: bool) -> torch.Tensor:
        modules = [_Calls(function), _Calls(torch.sin)]
        sites = tuple(Site(fqn=f"attention.{n}", module=m) for n, m in enumerate(modules))
        swap = install(SwapPlan(sites=sites, policy=SwapPolicy(min_bytes=1))) if swapped else None
        leaf = x.clone().requires_grad_()
        modules[1](modules[0](leaf * 1)).sum().backward()
        if swap is not None:
            assert swap.stats().saved_bytes > 0
            swap.remove()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(swapped=True), gradient(swapped=False))
