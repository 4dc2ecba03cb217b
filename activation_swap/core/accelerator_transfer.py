# SPDX-License-Identifier: Apache-2.0
"""The transfer of an accelerator: one stream out, one stream in, events between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from activation_swap.core.torch_private import copy_all, current_stream, free_pinned_cache
from activation_swap.core.transfer import Fence, pair

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from activation_swap._overlap import Overlap
    from activation_swap.core.transfer import Move

__all__ = ["AcceleratorTransfer"]


class AcceleratorTransfer:
    """Copies through ``torch.accelerator`` and page-locked memory.

    D2H and H2D have a stream each, since the link carries both directions at once. Compute waits
    for a copy only through events, and the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlaps: list[Overlap] = []
        self._index = device.index
        self._d2h_stream = torch.Stream(device=device)
        self._h2d_stream = torch.Stream(device=device)
        self._d2h_lane = f"d2h:{device}"
        self._h2d_lane = f"h2d:{device}"
        self._d2h_sequence = 0
        self._h2d_sequence = 0
        self._capturing = getattr(
            torch.get_device_module(device), "is_current_stream_capturing", None
        )

    def compute_stream(self) -> torch.Stream:
        """Return the calling thread's current stream of the device.

        Always asked for outside of the transfer streams' contexts: inside, the current stream is
        the transfer stream, and a wait taken there orders nothing.
        """
        return current_stream(self._index)

    def on(self, stream: torch.Stream) -> torch.Stream:
        """Return ``stream`` itself, which is a context."""
        return stream

    def allocate_slab(self, nbytes: int) -> torch.Tensor:
        """Return ``uint8[nbytes]`` of page-locked memory.

        Raises:
            RuntimeError: The memory cannot be had.
        """
        # Named, since torch.set_default_device may name the accelerator.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def free_slabs(self) -> None:
        """Give freed page-locked memory back to the operating system."""
        free_pinned_cache()

    def offload(
        self,
        moves: Sequence[Move],
        *,
        stream: torch.Stream,
        after: Iterable[Fence],
    ) -> Fence:
        """Launch D2H copies behind ``stream`` and ``after``."""
        d2h = self._d2h_stream
        # The sources are written by kernels that compute has queued but maybe not run.
        d2h.wait_stream(stream)
        for fence in after:
            # The host bytes may still be read by the reload of their last owner.
            if fence.lane != self._d2h_lane:
                d2h.wait_event(fence.event)
        with d2h:
            hosts, devices = pair(moves)
            copy_all(hosts, devices)
        self._d2h_sequence += 1
        return Fence(self._d2h_lane, self._d2h_sequence, d2h.record_event())

    def reload(
        self,
        moves: Sequence[Move],
        *,
        stream: torch.Stream,
        after: Iterable[Fence],
    ) -> Fence:
        """Launch H2D copies behind ``stream`` and ``after``."""
        h2d = self._h2d_stream
        # The targets come from blocks that kernels queued earlier on `stream` may still use.
        h2d.wait_stream(stream)
        for fence in after:
            # The host bytes must have arrived before they are read.
            if fence.lane != self._h2d_lane:
                h2d.wait_event(fence.event)
        with h2d:
            hosts, devices = pair(moves)
            copy_all(devices, hosts)
        self._h2d_sequence += 1
        return Fence(self._h2d_lane, self._h2d_sequence, h2d.record_event())

    def wait(self, stream: torch.Stream, fence: Fence) -> None:
        """Make ``stream`` wait for ``fence``."""
        if not self.overlaps:
            stream.wait_event(fence.event)
            return
        before = stream.record_event(torch.Event(self.device, enable_timing=True))
        stream.wait_event(fence.event)
        after = stream.record_event(torch.Event(self.device, enable_timing=True))
        for overlap in list(self.overlaps):
            overlap.add(fence.lane, stream=stream, before=before, after=after)

    def lend(self, tensor: torch.Tensor, *, owner: torch.Stream, reader: torch.Stream) -> None:
        """Make ``reader`` wait for ``owner``, and tell the allocator of it."""
        reader.wait_stream(owner)
        tensor.record_stream(reader)

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""
        return self._capturing is not None and self._capturing()
