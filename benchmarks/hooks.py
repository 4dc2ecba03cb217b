# SPDX-License-Identifier: Apache-2.0
"""The Python cost of one attention under the swap, without copies: forward and backward.

``python -m benchmarks.hooks`` times and profiles it on a CPU; a test bounds its number of calls.
Real attentions of a small model with the saved tensors of the 30B shape run in a chain.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from activation_swap import SwapPolicy, registry
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.install import install
from activation_swap.core.link import Links
from activation_swap.core.swap_plan import SwapPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from activation_swap.core.install import InstalledSwap
    from activation_swap.core.transfer import Fence, Move

__all__ = ["AttentionChain", "calls_per_attention", "count_calls"]

_TOKENS: Final = 16
_HIDDEN: Final = 128
_MIN_BYTES: Final = 2048


class _NoCopies(HostTransfer):
    """Moves nothing."""

    def offload(self, moves: Sequence[Move], *, stream: None, after: Iterable[Fence]) -> Fence:
        """Launch nothing."""
        return super().offload(moves[:0], stream=stream, after=after)

    def reload(self, moves: Sequence[Move], *, stream: None, after: Iterable[Fence]) -> Fence:
        """Launch nothing."""
        return super().reload(moves[:0], stream=stream, after=after)


class AttentionChain:
    """The attentions of a small model, one after the other; calling it trains them one step.

    Args:
        attentions: How many.
        swapped: Whether their activations are offloaded (nothing is copied).
    """

    def __init__(self, attentions: int, *, swapped: bool) -> None:
        model = _model(attentions)
        self._modules = [layer.self_attn for layer in model.model.layers]
        self._leaf = torch.randn(1, _TOKENS, _HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self._rotary = model.model.rotary_emb(self._leaf, torch.arange(_TOKENS)[None])
        self._installed: InstalledSwap | None = None
        if swapped:
            policy = SwapPolicy(min_bytes=_MIN_BYTES)
            plan = SwapPlan(sites=registry.explain(model).sites, policy=policy)
            self._installed = install(plan, links=Links(policy, make_transfer=_NoCopies))

    def __call__(self) -> None:
        """Go forward and back."""
        # A sum, as the residual stream is one: saved by nobody else, and no leaf.
        hidden = self._leaf + self._leaf
        for module in self._modules:
            hidden, _ = module(
                hidden_states=hidden, position_embeddings=self._rotary, attention_mask=None
            )
        hidden.sum().backward()  # type: ignore[no-untyped-call]

    def offloaded_storages(self) -> int:
        """Return the number of storages offloaded so far."""
        return 0 if self._installed is None else self._installed.stats().offloaded_storages


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of Python and C calls that ``function`` makes in this thread."""
    calls = 0

    def profiler(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def calls_per_attention() -> int:
    """Return what the swap adds to the calls of one attention, forward and backward.

    The difference of two lengths of the chain: neither its first nor its last attention.
    """
    added = [
        _settled_calls(AttentionChain(attentions, swapped=True))
        - _settled_calls(AttentionChain(attentions, swapped=False))
        for attentions in (3, 4)
    ]
    return added[1] - added[0]


def _settled_calls(chain: AttentionChain) -> int:
    for _ in range(2):
        chain()
    return count_calls(chain)


def _model(layers: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - slow to import

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        attn_implementation="sdpa",
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def _microseconds(chain: AttentionChain, attentions: int, repetitions: int = 100) -> list[float]:
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        chain()
        times.append((time.perf_counter() - began) / attentions * 1e6)
    return times


def main() -> None:
    """Print the cost of one attention."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    profiled = parser.parse_args().profile
    torch.set_num_threads(1)
    attentions = 8
    plain, swapped = (AttentionChain(attentions, swapped=value) for value in (False, True))
    for chain in (plain, swapped):
        _microseconds(chain, attentions, 10)
    without, with_swap = (
        statistics.quantiles(_microseconds(chain, attentions), n=10)[0]
        for chain in (plain, swapped)
    )
    print(
        f"us per attention, first decile: {with_swap - without:.0f} "
        f"({without:.0f} without); calls {calls_per_attention()}"
    )
    if profiled:
        profile = cProfile.Profile()
        profile.enable()
        _microseconds(swapped, attentions)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
