"""The Python cost of one attention call: pack, seal, release, reload and unpack, without copies.

``python -m benchmarks.hooks`` times and profiles it on a CPU; a test bounds its number of calls.
It records what one attention of the 30B shape saves (smaller, with the same classes of tensors),
then repeats the engine's work on that.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from activation_swap import SwapPolicy
from activation_swap.core.group import unpack
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.install import InstalledSwap
from activation_swap.core.link import Links
from activation_swap.core.site import Site, SwapPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from activation_swap.core.transfer import Fence, Move

__all__ = ["AttentionWork", "calls_per_attention", "count_calls"]

_ATTENTIONS = 2
_TOKENS = 256


class _NoCopies(HostTransfer):
    """Moves nothing."""

    def offload(self, moves: Sequence[Move], *, stream: None, after: Iterable[Fence]) -> Fence:
        """Launch nothing."""
        return super().offload(moves[:0], stream=stream, after=after)

    def reload(self, moves: Sequence[Move], *, stream: None, after: Iterable[Fence]) -> Fence:
        """Launch nothing."""
        return super().reload(moves[:0], stream=stream, after=after)


class AttentionWork:
    """What the engine does for two attentions in one step; calling it does it once."""

    def __init__(self) -> None:
        self._saved, self._kwargs = _saved_by_attention()
        policy = SwapPolicy(min_bytes=8192)
        module = torch.nn.Identity()
        # A third attention, whose group would stay: neither of the two is the last.
        sites = tuple(Site(fqn=f"layers.{index}", module=module) for index in range(3))
        self._installed = InstalledSwap(
            SwapPlan(sites=sites, policy=policy), links=Links(policy, make_transfer=_NoCopies)
        )
        self._tracer = self._installed._tracer  # noqa: SLF001 - the hooks' own way in
        with warnings.catch_warnings():
            # The tensors are held here to be saved again, and the engine warns of that, once.
            warnings.simplefilter("ignore", RuntimeWarning)
            self()

    def __call__(self) -> None:
        """Go forward through two attentions and back."""
        calls = [self._forward(index) for index in range(_ATTENTIONS)]
        with torch.no_grad():
            for handles in reversed(calls):
                for handle in handles:
                    unpack(handle)

    def offloaded_storages(self) -> int:
        """Return the number of storages offloaded so far."""
        return self._installed.stats().offloaded_storages

    def _forward(self, index: int) -> list[Any]:
        self._tracer.enter(index, (), self._kwargs)
        recorder = self._tracer._open.recorders[-1]  # noqa: SLF001
        with torch.no_grad():
            handles = [recorder.pack(tensor) for tensor in self._saved]
        self._tracer.leave(index, (torch.empty(0), None))
        return handles


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of Python and C calls that ``function`` makes."""
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


def calls_per_attention(work: AttentionWork) -> int:
    """Return the calls that one attention costs in a step, forward and backward."""
    return count_calls(work) // _ATTENTIONS


def _saved_by_attention() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the tensors that one attention saves, in order, and the arguments of its call."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - slow to import

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        attn_implementation="sdpa",
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    # Times 1: saved by a node, as in the model, and no leaf.
    hidden = torch.randn(1, _TOKENS, 128, dtype=torch.bfloat16, requires_grad=True) * 1
    kwargs = {
        "hidden_states": hidden,
        "position_embeddings": model.model.rotary_emb(hidden, torch.arange(_TOKENS)[None]),
        "attention_mask": None,
    }
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.layers[0].self_attn(**kwargs)
    return saved, kwargs


def main() -> None:
    """Print the cost of one attention call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    profiled = parser.parse_args().profile
    torch.set_num_threads(1)
    work = AttentionWork()
    for _ in range(20):
        work()
    times = []
    for _ in range(300):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) / _ATTENTIONS * 1e6)
    fastest = statistics.quantiles(times, n=10)[0]
    print(
        f"us per attention: median {statistics.median(times):.1f}, p10 {fastest:.1f}; "
        f"calls {calls_per_attention(work)}"
    )
    if profiled:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(200):
            work()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
