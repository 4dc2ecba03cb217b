# SPDX-License-Identifier: Apache-2.0
"""Finds what an accelerator could reorder: accesses to one memory that no fence separates."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from activation_swap.core.link import Links
from tests.core.recording_transfer import (
    Operation,
    Record,
    RecordingTransfer,
    Span,
    span_of,
)
from tests.models import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from activation_swap import SwapPolicy
    from activation_swap.core.transfer import Fence

__all__ = ["Race", "Recording", "races", "recording"]

Clock = dict[str, int]
COPIES = {Operation.OFFLOAD, Operation.RELOAD}


@dataclass(frozen=True)
class Race:
    """Two records that touch one memory, one of them writing, with no order between them."""

    first: Record
    second: Record

    def __str__(self) -> str:
        return " || ".join(
            f"{record.operation.name} on {record.stream}" for record in (self.first, self.second)
        )


@dataclass
class _Access:
    record: Record
    clock: Clock
    number: int


def _overlap(some: Iterable[Span], others: Iterable[Span]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in some for b in others)


def _conflict(one: Record, other: Record) -> bool:
    return (
        _overlap(one.writes, other.writes)
        or _overlap(one.writes, other.reads)
        or _overlap(one.reads, other.writes)
    )


class _Clocks:
    """Vector clocks: for each stream, how much of every other stream it comes after."""

    def __init__(self) -> None:
        self._of: dict[str, Clock] = {}
        self._lent: list[tuple[Span, str]] = []
        self._fences: dict[tuple[str, int], Clock] = {}

    def advance(self, record: Record) -> Clock:
        """Return the time at which a record's operation begins."""
        clock = self._of.setdefault(record.stream, {})
        if record.operation is Operation.WAIT and record.fence is not None:
            self._join(clock, self._at(record.fence))
        if record.operation is Operation.LEND:
            self._join(clock, self._of.get(str(record.source), {}))
            self._lent += [(span, record.stream) for span in record.reads]
        if record.operation is Operation.FREE:
            clock = self._freed(record, clock)
        if record.operation in COPIES:
            self._join(clock, self._of.get(str(record.source), {}))
            for fence in record.after:
                self._join(clock, self._at(fence))
        clock[record.stream] = clock.get(record.stream, 0) + 1
        now = dict(clock)
        if record.operation in COPIES and record.fence is not None:
            self._fences[record.fence.lane, record.fence.sequence] = now
        return now

    def _freed(self, record: Record, clock: Clock) -> Clock:
        """Return when a block may be used again; its stream itself waits for nothing."""
        clock = dict(clock)
        for span, stream in [lent for lent in self._lent if _overlap(record.writes, lent[:1])]:
            self._join(clock, self._of.get(stream, {}))
            self._lent.remove((span, stream))
        return clock

    def _at(self, fence: Fence) -> Clock:
        return self._fences[fence.lane, fence.sequence]

    @staticmethod
    def _join(clock: Clock, other: Mapping[str, int]) -> None:
        for stream, time in other.items():
            clock[stream] = max(clock.get(stream, 0), time)


def races(log: Iterable[Record]) -> list[Race]:
    """Return every pair of conflicting accesses, a copy or a free among them, without an order.

    A record comes before another if it is earlier on the same stream, or if fences lead from it
    to the other. A free is taken for a write to the whole block: whoever allocates next on that
    stream may use it at once, behind the streams that the block was lent to. An earlier compute
    on any stream is checked against a copy, too, and against the free of what it had as its owner.
    """
    clocks = _Clocks()
    copies: list[_Access] = []
    computes: list[_Access] = []
    owned: dict[Span, int] = {}
    found = []
    for number, record in enumerate(log):
        now = clocks.advance(record)
        if record.operation is Operation.OWN:
            owned[record.writes[0]] = number
        if record.operation in {Operation.WAIT, Operation.LEND, Operation.OWN}:
            continue
        is_copy = record.operation in COPIES
        earlier = copies if record.operation is Operation.COMPUTE else [*copies, *computes]
        if record.operation is Operation.FREE:
            since = owned.get(record.writes[0], -1)
            earlier = [*copies, *(access for access in computes if access.number > since)]
        found += [
            Race(access.record, record)
            for access in earlier
            if now.get(access.record.stream, 0) < access.clock[access.record.stream]
            and _conflict(access.record, record)
        ]
        (copies if is_copy else computes).append(_Access(record, now, number))
    return found


class _Watch(TorchDispatchMode):
    """Adds every kernel that the model runs to the log, with the memory that it touches."""

    def __init__(self, transfers: list[RecordingTransfer], log: list[Record]) -> None:
        super().__init__()
        self._transfers = transfers
        self._log = log

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(transfer.copying for transfer in self._transfers) or not self._transfers:
            return result
        if func.is_view or func._schema.name in {"aten::detach", "aten::set_"}:
            return result
        inputs, outputs = _spans((args, kwargs)), _spans(result)
        stream = self._transfers[0].compute_stream()
        owner = self._transfers[0].owner
        if owner is not None and isinstance(result, torch.Tensor):
            # Of the swap's own making, as what came back narrow and was widened.
            self._transfers[0].watch(result, owner)
        # In-place and out= kernels return what they write.
        self._log.append(Record(Operation.COMPUTE, stream, reads=inputs, writes=outputs))
        return result


def _spans(tree: Any) -> tuple[Span, ...]:
    leaves, _ = tree_flatten(tree)
    return tuple({span_of(leaf): None for leaf in leaves if isinstance(leaf, torch.Tensor)})


@dataclass
class Recording:
    """The log of a run, and the links that write it."""

    links: Links
    log: list[Record]
    transfers: list[RecordingTransfer] = field(default_factory=list)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Write down what the model computes, as well."""
        with _Watch(self.transfers, self.log):
            yield

    def count(self, operation: Operation) -> int:
        """Return the number of records of one kind."""
        return sum(record.operation is operation for record in self.log)


def recording(
    policy: SwapPolicy = EVERYTHING,
    *,
    kind: Callable[[torch.device, list[Record]], RecordingTransfer] = RecordingTransfer,
) -> Recording:
    """Return links whose transfers write one log."""
    log: list[Record] = []
    transfers: list[RecordingTransfer] = []

    def make(device: torch.device) -> RecordingTransfer:
        transfers.append(kind(device, log))
        return transfers[-1]

    return Recording(
        Links(policy, make_transfer=make, system_headroom=lambda: None), log, transfers
    )
