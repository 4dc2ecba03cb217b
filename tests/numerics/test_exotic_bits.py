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
        (lambda x: x.float().view(2, 2), False),
        (lambda x: x, False),
    ],
    ids=["float", "to", "times", "in-place", "fp16", "fp64", "detached", "view", "bf16"],
)
def test_only_a_proven_upcast_is_narrowed(make: Any, *, proven: bool) -> None:
    x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True) * 1
    assert is_upcast(make(x)) is proven
