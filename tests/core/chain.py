# SPDX-License-Identifier: Apache-2.0
"""A chain of attentions of our own, where a test can put any code into the middle of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from activation_swap import SwapPolicy
from activation_swap._site import Site
from activation_swap.core.install import install
from activation_swap.core.swap_plan import SwapPlan
from tests.models import equal_bits, gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from activation_swap.core.install import InstalledSwap
    from activation_swap.core.link import Links

__all__ = ["Attention", "Chain", "install_chain"]

POLICY = SwapPolicy(min_bytes=1, slab_bytes=4096)


class Attention(nn.Module):
    """Saves three storages: its input, and the results of two kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.inner: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        mixed = self.inner(self.proj(hidden).exp())
        return mixed * mixed.sin(), None


class Chain(nn.Module):
    """Attentions with residuals."""

    def __init__(self, *, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attentions: Any = nn.ModuleList([Attention(width) for _ in range(layers)])
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, hidden: hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, attention in enumerate(self.attentions):
            hidden = hidden + attention(hidden)[0]
            hidden = self.between(index, hidden)
        return hidden.square().mean()


def install_chain(
    chain: Chain, policy: SwapPolicy = POLICY, *, links: Links | None = None
) -> InstalledSwap:
    """Put a swap on every attention of a chain."""
    sites = tuple(
        Site(fqn=f"attentions.{index}", module=module, owners=(chain,), returns=2)
        for index, module in enumerate(chain.attentions)
    )
    return install(SwapPlan(sites=sites, policy=policy), links=links)


def run(chain: Chain, hidden: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Train one step; return loss and gradients."""
    chain.zero_grad(set_to_none=True)
    loss = chain(hidden)
    loss.backward(**options)
    return gradients(chain) | {"loss": loss.detach()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two steps have equal bits."""
    return one.keys() == other.keys() and all(equal_bits(v, other[k]) for k, v in one.items())
