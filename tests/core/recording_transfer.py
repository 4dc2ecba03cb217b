# SPDX-License-Identifier: Apache-2.0
"""The transfer of a proof: it copies as the host does and writes down what orders what."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from activation_swap.core.host_transfer import HostTransfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from activation_swap._overlap import Overlap
    from activation_swap.core.transfer import Fence, Move

__all__ = ["Operation", "Record", "RecordingTransfer", "Span", "span_of"]


class Operation(Enum):
    """What a record is of."""

    COMPUTE = auto()
    """A kernel of the model. Not written here: whoever watches the model adds it to the log."""
    OFFLOAD = auto()
    """A launched batch of D2H copies."""
    RELOAD = auto()
    """A launched batch of H2D copies."""
    WAIT = auto()
    """A compute stream that was ordered after a fence."""
    LEND = auto()
    """A compute stream that was ordered after another one, ``source``, whose storage it may read
    until that is freed."""
    OWN = auto()
    """A device storage that is watched from here on. Its memory had other owners before."""
    FREE = auto()
    """A device storage that was given back to the allocator of its stream."""


class Span(NamedTuple):
    """A range of memory: ``[start, stop)`` in bytes."""

    start: int
    stop: int


class Record(NamedTuple):
    """One operation, in the order of its launch.

    Attributes:
        operation: What it is.
        stream: The stream that it runs on.
        reads: Memory that it reads.
        writes: Memory that it writes; for FREE the memory that anybody may write from now on.
        source: The compute stream that a copy was launched behind.
        after: The fences that it was launched behind.
        fence: The fence that it ends with: of a copy its own, of a wait the one waited for.
    """

    operation: Operation
    stream: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    source: str | None = None
    after: tuple[Fence, ...] = ()
    fence: Fence | None = None


def span_of(tensor: torch.Tensor) -> Span:
    """Return the memory of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class RecordingTransfer:
    """Makes every ordering decision of the engine visible, so that it can be proved right.

    Copies are synchronous, so that a training run gives its usual numbers; what an accelerator
    would have been free to reorder is decided from the log alone.

    Args:
        device: The device that it serves; its memory must be ordinary host memory.
        log: Gets the records. Others may add theirs.

    Attributes:
        copying: Whether a copy runs now: what runs then is no kernel of the model.
        owner: The stream whose memory is allocated now, inside of :meth:`on`.
    """

    def __init__(self, device: torch.device, log: list[Record]) -> None:
        self.device = device
        self.overlaps: list[Overlap] = []
        self.log = log
        self.copying = False
        self._host = HostTransfer(device)
        self.owner: str | None = None
        self._watched: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def compute_stream(self) -> str:
        """Return a name: each thread computes on a stream of its own."""
        return self.owner or f"compute:{threading.current_thread().name}"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Return a context in which ``stream`` is the current one."""
        outer, self.owner = self.owner, stream
        try:
            yield
        finally:
            self.owner = outer

    def allocate_slab(self, nbytes: int) -> torch.Tensor:
        """Return ``uint8[nbytes]`` of pageable memory."""
        return self._host.allocate_slab(nbytes)

    def free_slabs(self) -> None:
        """Do nothing: freed pageable memory is the allocator's."""

    def offload(self, moves: Sequence[Move], *, stream: str, after: Iterable[Fence]) -> Fence:
        """Copy out at once, and record what the copies were launched behind."""
        reads = tuple(self.watch(tensor, stream) for tensor, _ in moves)
        writes = tuple(_piece(piece) for _, host in moves for piece in host)
        with self._copying():
            fence = self._host.offload(moves, stream=None, after=())
        record = Record(
            Operation.OFFLOAD, fence.lane, reads, writes, stream, after=tuple(after), fence=fence
        )
        self.log.append(record)
        return fence

    def reload(self, moves: Sequence[Move], *, stream: str, after: Iterable[Fence]) -> Fence:
        """Copy in at once, and record what the copies were launched behind."""
        reads = tuple(_piece(piece) for _, host in moves for piece in host)
        writes = tuple(self.watch(tensor, stream) for tensor, _ in moves)
        with self._copying():
            fence = self._host.reload(moves, stream=None, after=())
        record = Record(
            Operation.RELOAD, fence.lane, reads, writes, stream, after=tuple(after), fence=fence
        )
        self.log.append(record)
        return fence

    def wait(self, stream: str, fence: Fence) -> None:
        """Record that ``stream`` was ordered after ``fence``."""
        self.log.append(Record(Operation.WAIT, stream, fence=fence))

    def lend(self, tensor: torch.Tensor, *, owner: str, reader: str) -> None:
        """Record that ``reader`` was ordered after ``owner``, and reads until it is freed."""
        span = (span_of(tensor),)
        self.log.append(Record(Operation.LEND, reader, reads=span, source=owner))

    def capturing(self) -> bool:
        """Return ``False``."""
        return False

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self.copying = True
        try:
            yield
        finally:
            self.copying = False

    def watch(self, tensor: torch.Tensor, stream: str) -> Span:
        """Record when the storage of a device tensor is given back."""
        span = span_of(tensor)
        storage = tensor.untyped_storage()
        if storage not in self._watched:
            self._watched.add(storage)
            self.log.append(Record(Operation.OWN, stream, writes=(span,)))
            record = Record(Operation.FREE, stream, writes=(span,))
            weakref.finalize(storage, self.log.append, record).atexit = False
        return span


def _piece(tensor: torch.Tensor) -> Span:
    return Span(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)
