# SPDX-License-Identifier: Apache-2.0
"""Host memory for offloaded storages: slabs, cut to the byte, reused behind fences."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from threading import RLock
from typing import TYPE_CHECKING

import torch

from activation_swap.core.transfer import Fence, merge_fences

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIGNMENT", "HostBlock", "PinnedPool", "aligned"]

ALIGNMENT = 512
"""Copies that start on this many bytes run at the full rate of the link."""

_MAX_VIEWS = 1024
"""Blocks whose tensors are kept for reuse. A step has one per layer; changing lengths have more."""

Piece = tuple[int, int, int]
"""(slab index, first byte, byte after the last)."""
Span = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""(first byte in the block, number of bytes; dtype, size and stride of the tensor there)."""


def aligned(nbytes: int) -> int:
    """Round up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class HostBlock:
    """Host bytes of one group, possibly in several pieces; returned to the pool when dropped.

    Attributes:
        nbytes: Size.
        fences: The copies that touched these bytes last: before the first write those of the
            former owner, later the owner's own.
    """

    __slots__ = ("_pieces", "_pool", "_slabs", "fences", "nbytes")

    def __init__(
        self,
        pool: PinnedPool,
        pieces: tuple[Piece, ...],
        slabs: tuple[torch.Tensor, ...],
        nbytes: int,
        fences: tuple[Fence, ...],
    ) -> None:
        self._pool = pool
        self._pieces = pieces
        # A reference to each slab: a block outlives a closed pool for as long as its graph lives.
        self._slabs = slabs
        self.nbytes = nbytes
        self.fences = fences

    def tensors(self, spans: tuple[Span, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return each span as a tensor of its form, or as several flat ones where it is cut.

        Steps repeat, and so do the places of their blocks: making the tensors anew each time would
        cost more than looking them up.
        """
        cache = self._pool.views
        key = (self._pieces, spans)
        found = cache.get(key)
        if found is None:
            found = tuple(self._cut(*span) for span in spans)
            if len(cache) >= _MAX_VIEWS:
                cache.clear()
            if not self._pool.closed:
                cache[key] = found
        return found

    def _cut(
        self,
        start: int,
        nbytes: int,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        stop = start + nbytes
        found: list[torch.Tensor] = []
        position = 0
        for slab, (_, first, last) in zip(self._slabs, self._pieces, strict=True):
            low, high = max(start, position), min(stop, position + last - first)
            if low < high:
                begin = first + low - position
                found.append(slab[begin : begin + high - low])
            position += last - first
        # Pieces begin and end on multiples of the alignment, and so on whole elements.
        flat = tuple(piece.view(dtype) for piece in found)
        return (flat[0].as_strided(size, stride),) if len(flat) == 1 else flat

    def __del__(self) -> None:
        self._pool.give_back(self._pieces, self.fences)


class PinnedPool:
    """Slabs of host memory with a free list in address order.

    A block may be cut over several free pieces, so that no order of sizes fragments the pool: it
    grows only when fewer bytes are free than asked for, and then by whole slabs. Reserved memory
    is therefore at most the largest number of bytes out at once plus one slab.

    Reuse never waits for the host: a block carries the fences of the last copies that touched
    its bytes, and the next copy into them is ordered behind those on the device.

    Args:
        allocate_slab: Returns ``uint8[nbytes]`` of host memory or raises ``RuntimeError``.
        slab_bytes: Size of one slab.
        headroom: Returns how many more bytes may be reserved, ``None`` for no limit.
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], torch.Tensor],
        *,
        slab_bytes: int,
        headroom: Callable[[], int | None],
    ) -> None:
        self._allocate_slab = allocate_slab
        self._slab_bytes = slab_bytes
        self._headroom = headroom
        self._slabs: list[torch.Tensor] = []
        self._free: list[tuple[int, int, int, tuple[Fence, ...]]] = []
        self._free_bytes = 0
        self.views: dict[
            tuple[tuple[Piece, ...], tuple[Span, ...]], tuple[tuple[torch.Tensor, ...], ...]
        ] = {}
        # Blocks are dropped by whichever thread lets go of a graph, also in the middle of
        # `allocate` when the garbage collector runs there: they queue here until it asks.
        self._returned: deque[tuple[tuple[Piece, ...], tuple[Fence, ...]]] = deque()
        self._lock = RLock()
        self.closed = False
        self.failure: str | None = None
        self._refused_slabs: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes in slabs."""
        return len(self._slabs) * self._slab_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes in blocks that have an owner."""
        with self._lock:
            self._absorb()
            return self.reserved_bytes - self._free_bytes

    def allocate(self, nbytes: int) -> HostBlock | None:
        """Return a block of ``nbytes``, or ``None`` when the pool may not or cannot grow.

        What was refused is not asked for again, since that costs time in every layer: as many
        slabs as were beyond the headroom, or any at all once the system could not give one.
        ``failure`` then says what happened.
        """
        with self._lock:
            self._absorb()
            if nbytes == 0:
                return HostBlock(self, (), (), 0, ())
            if self._free_bytes < nbytes and not self._grow(nbytes - self._free_bytes):
                return None
            return self._take(nbytes)

    def give_back(self, pieces: tuple[Piece, ...], fences: tuple[Fence, ...]) -> None:
        """Take the pieces of a dropped block. Never blocks: called from finalizers."""
        if not self.closed:
            self._returned.append((pieces, fences))

    def close(self) -> None:
        """Give all slabs up. Blocks that are still out keep theirs alive until they drop."""
        with self._lock:
            self.closed = True
            self._refuse("the swap was removed", slabs=1)
            self._returned.clear()
            self._slabs = []
            # Blocks that are still out refer to slabs by themselves, and look nothing up again.
            self.views = {}
            self._free = []
            self._free_bytes = 0

    def _grow(self, missing: int) -> bool:
        slabs = -(-missing // self._slab_bytes)
        if self._refused_slabs is not None and slabs >= self._refused_slabs:
            return False
        asked = slabs * self._slab_bytes
        allowed = self._headroom()
        if allowed is not None and asked > allowed:
            return self._refuse(f"{asked} bytes asked for, {allowed} allowed", slabs=slabs)
        for _ in range(slabs):
            try:
                slab = self._allocate_slab(self._slab_bytes)
            except RuntimeError as error:
                return self._refuse(f"{asked} bytes asked for: {error}", slabs=1)
            self._slabs.append(slab)
            self._insert((len(self._slabs) - 1, 0, self._slab_bytes), ())
        return True

    def _refuse(self, failure: str, *, slabs: int) -> bool:
        self.failure = failure
        self._refused_slabs = slabs
        return False

    def _take(self, nbytes: int) -> HostBlock:
        pieces: list[Piece] = []
        fences: tuple[Fence, ...] = ()
        wanted = nbytes
        used = 0
        for slab, first, last, behind in self._free:
            take = min(wanted, last - first)
            pieces.append((slab, first, first + take))
            fences = merge_fences(fences, behind)
            wanted -= take
            if take == last - first:
                used += 1
            if wanted == 0:
                break
        left = self._free[used:]
        if used < len(pieces):
            slab, _, stop = pieces[-1]
            _, _, last, behind = left[0]
            left[0] = (slab, stop, last, behind)
        slabs = tuple([self._slabs[piece[0]] for piece in pieces])
        # In this order: an interrupt between two lines may lose bytes until the pool is closed, but
        # must not give them to two owners, nor promise bytes that are not there.
        self._free_bytes -= nbytes
        self._free = left
        return HostBlock(self, tuple(pieces), slabs, nbytes, fences)

    def _absorb(self) -> None:
        while self._returned:
            pieces, fences = self._returned.popleft()
            for piece in pieces:
                self._insert(piece, fences)

    def _insert(self, piece: Piece, fences: tuple[Fence, ...]) -> None:
        slab, first, last = piece
        nbytes = last - first
        index = bisect_left(self._free, (slab, first), key=_address)
        self._free.insert(index, (slab, first, last, fences))
        # Join with the neighbours of the same slab, so that blocks stay in few pieces.
        if index + 1 < len(self._free) and self._free[index + 1][:2] == (slab, last):
            _, _, last, behind = self._free.pop(index + 1)
            fences = merge_fences(fences, behind)
        if index and self._free[index - 1][0] == slab and self._free[index - 1][2] == first:
            _, first, _, behind = self._free.pop(index - 1)
            fences = merge_fences(fences, behind)
            index -= 1
        self._free[index] = (slab, first, last, fences)
        self._free_bytes += nbytes


def _address(entry: tuple[int, int, int, tuple[Fence, ...]]) -> tuple[int, int]:
    return entry[:2]
