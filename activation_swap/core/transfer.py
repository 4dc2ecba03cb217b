# SPDX-License-Identifier: Apache-2.0
"""What moves bytes between a device and the host: the protocol, and one copy in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from activation_swap._overlap import Overlap

__all__ = ["Copy", "Fence", "Move", "Transfer", "merge_fences", "pair"]


Move = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""One storage's way over the link, in either direction: (device, host).

``device`` is what travels of the storage: all of it, or the upper halves of fp32 as bf16. ``host``
is one tensor of the same dtype, size and stride, or several flat ones where its bytes are cut over
pieces.

A plain tuple: some twenty are made for each attention.
"""


def pair(moves: Iterable[Move]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return host and device tensors in pairs, each device tensor cut where its host bytes are."""
    hosts: list[torch.Tensor] = []
    devices: list[torch.Tensor] = []
    for device, host in moves:
        hosts += host
        if len(host) == 1:
            devices.append(device)
        else:
            # It has no gaps, and this is the order of its bytes.
            flat = device.as_strided((device.numel(),), (1,))
            devices += torch.split(flat, [piece.numel() for piece in host])
    return hosts, devices


class Fence:
    """The completion of everything queued on one lane up to a point.

    Attributes:
        lane: Name of the transfer stream. Fences of one lane complete in their order.
        sequence: Position on the lane.
        event: What the transfer waits on.
    """

    __slots__ = ("event", "lane", "sequence")

    def __init__(self, lane: str, sequence: int, event: Any) -> None:
        self.lane = lane
        self.sequence = sequence
        self.event = event

    def __repr__(self) -> str:
        return f"Fence({self.lane}#{self.sequence})"


def merge_fences(first: tuple[Fence, ...], second: tuple[Fence, ...]) -> tuple[Fence, ...]:
    """Return the latest fence of every lane: it implies the earlier ones of that lane."""
    if not second or first is second:
        return first
    if not first:
        return second
    latest: dict[str, Fence] = {}
    for fence in (*first, *second):
        known = latest.get(fence.lane)
        if known is None or known.sequence < fence.sequence:
            latest[fence.lane] = fence
    return tuple(latest.values())


class Transfer(Protocol):
    """Copies on one device. All methods are asynchronous for the caller.

    Attributes:
        device: The device.
        overlaps: What takes the waits of compute in, while somebody measures. The list of its
            owner, who adds and removes.
    """

    device: torch.device
    overlaps: list[Overlap]

    def compute_stream(self) -> Any:
        """Return the stream that the calling thread computes on now."""

    def on(self, stream: Any) -> Any:
        """Return a context in which allocations belong to ``stream``."""

    def allocate_slab(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory as ``uint8[nbytes]``, page-locked where that exists.

        Raises:
            RuntimeError: The memory cannot be had.
        """

    def free_slabs(self) -> None:
        """Give freed slabs back to the operating system."""

    def offload(
        self,
        moves: Sequence[Move],
        *,
        stream: Any,
        after: Iterable[Fence],
    ) -> Fence:
        """Launch device-to-host copies.

        The copies start when what ``stream`` has queued so far and every fence of ``after`` are
        complete.
        """

    def reload(
        self,
        moves: Sequence[Move],
        *,
        stream: Any,
        after: Iterable[Fence],
    ) -> Fence:
        """Launch host-to-device copies.

        The copies start when what ``stream`` has queued so far (the last use of the memory that
        the targets were allocated from) and every fence of ``after`` are complete.
        """

    def wait(self, stream: Any, fence: Fence) -> None:
        """Order what ``stream`` queues from now on after ``fence``."""

    def lend(self, tensor: torch.Tensor, *, owner: Any, reader: Any) -> None:
        """Let another stream read a tensor than the one that owns its memory.

        What ``reader`` queues from now on comes after what ``owner`` has queued so far. Once the
        memory is freed, it is not reused before ``reader`` is done with what it has queued then.
        """

    def capturing(self) -> bool:
        """Whether the calling thread's compute stream is captured into a graph."""


class Copy:
    """One launched batch of copies, and the device memory that it reads or writes.

    The memory must not return to its stream's allocator before that stream is ordered after the
    copy: :meth:`join` does both, once. A copy that loses its last owner (a dropped graph) joins
    itself, so that no block is reused while a copy still touches it.
    """

    __slots__ = ("_keepalive", "_stream", "_transfer", "fence")

    def __init__(
        self, transfer: Transfer, stream: Any, fence: Fence, keepalive: list[torch.Tensor]
    ) -> None:
        self._transfer = transfer
        self._stream = stream
        self._keepalive: list[torch.Tensor] | None = keepalive
        self.fence = fence

    def join(self) -> None:
        """Order the compute stream after the copy and let go of the memory. Repeatable."""
        if self._keepalive is not None:
            # The wait is queued before the references go: a block freed below is reused by this
            # stream only behind the wait. If it fails, the next try waits.
            self._transfer.wait(self._stream, self.fence)
            self._keepalive = None

    def __del__(self) -> None:
        self.join()
