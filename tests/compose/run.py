# SPDX-License-Identifier: Apache-2.0
"""One training of a combination: plain, counted or swapped; and what two of them must share."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from activation_swap import KeepReason, Swap, SwapPolicy, SwapStats, registry
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.link import transfer_for
from tests.compose.storages import AttentionCensus, WeightWatch
from tests.compose.tiny_model import batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from activation_swap.core.transfer import Transfer

__all__ = ["EVERYTHING", "Figures", "Kind", "Run", "check_equal", "compare"]

EVERYTHING = SwapPolicy(min_bytes=1, slab_bytes=2**20)
Figures = dict[str, int]


class Kind(Enum):
    """What a run does about attention's saved tensors."""

    PLAIN = auto()
    """Nothing; nothing else is installed either."""
    CENSUS = auto()
    """Count them."""
    SWAPPED = auto()
    """Swap them, and watch what moves."""


class _HeapTransfer(HostTransfer):
    """Takes its slabs from outside of torch, so that a CPU's "device" memory can be told apart."""

    def allocate_slab(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)


def _make_transfer(device: torch.device) -> Transfer:
    return _HeapTransfer(device) if device.type == "cpu" else transfer_for(device)


@dataclass
class Run:
    """One training.

    Attributes:
        kind: What it does.
        steps: How many steps a scenario is to train.
        measure: Whether the last step's memory is recorded.
        losses: One per recorded forward.
        tensors: Gradients and whatever else must be equal, by step and name.
        swap: The handle, once applied.
        stats: The swap's counters of the last step, once it is over.
        peak: Largest growth of torch's CPU memory in the last step, in bytes.
        moved_weights: Weights among the storages that moved.
        begun: Number of steps begun.
    """

    kind: Kind
    steps: int = 3
    measure: bool = False
    losses: list[torch.Tensor] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    swap: Swap = field(default_factory=Swap)
    stats: SwapStats = field(default_factory=SwapStats)
    peak: int = 0
    moved_weights: int = 0
    begun: int = 0
    _census: list[AttentionCensus] = field(default_factory=list)

    @classmethod
    def swapped(cls) -> Run:
        """Return a run for a refusal: it is never compared."""
        return cls(Kind.SWAPPED)

    def apply(self, model: nn.Module, policy: SwapPolicy = EVERYTHING) -> None:
        """Swap the attention of ``model``, or count it, or leave it alone."""
        if self.kind is Kind.SWAPPED:
            self.swap = registry.apply("attention", model, policy=policy)
            self.watch()
        elif self.kind is Kind.CENSUS:
            attentions = [m for n, m in model.named_modules() if n.endswith(".self_attn")]
            self._census += [AttentionCensus(a, WeightWatch(a)) for a in attentions]

    def watch(self, swap: Swap | None = None) -> None:
        """Watch what moves of a swap that somebody else applied."""
        if swap is not None:
            self.swap = swap
        installation: Any = self.swap._installation
        installation._links._make_transfer = _make_transfer
        watches = [WeightWatch(site.module()) for site in installation.sites]
        seal = installation._engine.seal

        def counted_seal(group: Any, storages: Any, **options: Any) -> None:
            for storage in storages:
                alias, _ = storage.aliases[0]
                identity = alias.untyped_storage()._cdata
                self.moved_weights += identity in watches[group.index].storages
            seal(group, storages, **options)

        installation._engine.seal = counted_seal

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround the forwards and backwards of one optimizer step."""
        self.begun += 1
        if self.begun == self.steps:
            self.swap.reset_stats()
            for census in self._census:
                census.nbytes.clear()
        if self.measure and self.begun == self.steps:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                yield
            self.peak = _peak(profiler)
        else:
            yield
        self.stats = self.swap.stats()

    def train(self, model: Any) -> None:
        """Do all steps without an optimizer: forward, backward, and a record of each."""
        for step in range(self.steps):
            with self.step():
                loss = model(**batch(step)).loss
                loss.backward()
                self.record(model, loss)
                del loss
            model.zero_grad()

    def record(self, model: nn.Module, *losses: torch.Tensor, part: str = "") -> None:
        """Keep a copy of losses and of every gradient of this rank."""
        self.losses += [_local(loss.detach()).clone() for loss in losses]
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                self.keep(f"{self.begun}.{part}{name}", weight.grad)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of one more tensor that must be equal."""
        self.tensors[name] = _local(tensor.detach()).clone()

    def counted_bytes(self) -> int:
        """Bytes of the last step's storages that a layer chain moves: all but the last layer's."""
        return sum(sum(census.nbytes) for census in self._census[:-1])

    def saved_bytes(self) -> int:
        """Bytes of all storages of the last step."""
        return sum(sum(census.nbytes) for census in self._census)


def _peak(profiler: Any) -> int:
    events = profiler.profiler.kineto_results.events()
    # By time: memory that communication threads free comes in a list of its own.
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(
    scenario: Callable[[Run], object],
    *,
    memory: bool = False,
    pipeline: bool = False,
    warns_of: str = "",
) -> Figures:
    """Train plain, counted and swapped, and check all that must hold.

    Args:
        scenario: Trains ``run.steps`` steps, each inside of ``run.step()``; records its results.
        memory: Whether to measure that the peak of torch's memory falls.
        pipeline: Whether a schedule decides what stays, rather than a layer chain.
        warns_of: What a warning of the swap must name; without it there must be none.

    Returns:
        Bytes of the last step.
    """
    plain, census, swapped = map(Run, Kind)
    scenario(plain)
    scenario(census)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scenario(swapped)
    own = [str(w.message) for w in caught if "activation_swap" in str(w.message)]
    assert len(own) == bool(warns_of), own
    assert all(warns_of in message for message in own), own
    check_equal(plain, swapped)
    assert swapped.moved_weights == 0, f"{swapped.moved_weights} weights moved"
    stats, total = swapped.stats, census.saved_bytes()
    expected = census.counted_bytes()
    if pipeline:
        left = (KeepReason.SCHEDULE, KeepReason.LAST)
        expected = total - sum(stats.kept_bytes.get(reason, 0) for reason in left)
    assert total > 0
    assert stats.saved_bytes == expected, (stats, expected)
    assert stats.reloaded_bytes == stats.offloaded_bytes, stats
    assert stats.reload_misses == 0, stats
    assert stats.live_groups == stats.host_bytes_in_use == stats.resident_bytes == 0, stats
    figures = {
        "attention_bytes": total,
        "saved_bytes": stats.saved_bytes,
        "link_bytes": stats.offloaded_bytes,
    }
    if not pipeline:
        assert stats.saved_bytes > 0, stats
        assert stats.resident_bytes_peak < total, (stats, total)
    if memory:
        figures |= _check_memory(scenario, stats.saved_bytes)
    return figures


def check_equal(plain: Run, swapped: Run) -> None:
    """Compare losses, gradients and whatever else was kept, bit for bit."""
    assert plain.begun == swapped.begun == plain.steps
    assert plain.tensors
    assert len(plain.losses) == len(swapped.losses)
    for number, (expected, got) in enumerate(zip(plain.losses, swapped.losses, strict=True)):
        assert torch.equal(expected, got), f"loss {number}: {expected} and {got}"
    assert plain.tensors.keys() == swapped.tensors.keys()
    different = [n for n, t in plain.tensors.items() if not torch.equal(t, swapped.tensors[n])]
    assert not different, different


def _check_memory(scenario: Callable[[Run], object], saved_bytes: int) -> Figures:
    distributed = torch.distributed.is_initialized()
    # A thread of gloo frees the buffer of a collective when it comes to it: on a busy machine that
    # may be a step later. That adds to a peak, and never takes from it.
    times, least = (3, 0.75) if distributed else (1, 0.95)
    plain, swapped = (
        min(_measured(scenario, kind) for _ in range(times)) for kind in (Kind.PLAIN, Kind.SWAPPED)
    )
    assert plain - swapped >= least * saved_bytes, (plain, swapped, saved_bytes)
    return {"peak_plain": plain, "peak_swapped": swapped}


def _measured(scenario: Callable[[Run], object], kind: Kind) -> int:
    run = Run(kind, steps=2, measure=True)
    scenario(run)
    return run.peak
