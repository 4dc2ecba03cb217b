# SPDX-License-Identifier: Apache-2.0
"""A device's way to host memory: its transfer and its pinned pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from activation_swap.core.accelerator_transfer import AcceleratorTransfer
from activation_swap.core.host_memory import host_headroom
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.pinned_pool import PinnedPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from activation_swap._config import SwapPolicy
    from activation_swap._overlap import Overlap
    from activation_swap.core.transfer import Transfer

__all__ = ["Link", "Links", "transfer_for"]


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer of a device: the CPU's own, or an accelerator's."""
    return HostTransfer(device) if device.type == "cpu" else AcceleratorTransfer(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One device's transfer and pool."""

    transfer: Transfer
    pool: PinnedPool


class Links:
    """The links of one swap, made when a device is first computed on.

    A model may be spread over several devices; each has streams and slabs of its own, and the
    policy's ceiling holds for their sum.

    Attributes:
        overlaps: What takes the waits of compute in, on every device, while somebody measures.
    """

    def __init__(
        self,
        policy: SwapPolicy,
        *,
        make_transfer: Callable[[torch.device], Transfer] = transfer_for,
        system_headroom: Callable[[], int | None] = host_headroom,
    ) -> None:
        self._policy = policy
        self._make_transfer = make_transfer
        self._system_headroom = system_headroom
        self._links: dict[torch.device, Link] = {}
        self.overlaps: list[Overlap] = []

    def of(self, device: torch.device) -> Link:
        """Return the link of ``device``."""
        link = self._links.get(device)
        if link is None:
            transfer = self._make_transfer(device)
            transfer.overlaps = self.overlaps
            pool = PinnedPool(
                transfer.allocate_slab,
                slab_bytes=self._policy.slab_bytes,
                headroom=self._headroom,
            )
            # Two threads may both get here: the first one's link is the one that stays.
            link = self._links.setdefault(device, Link(transfer=transfer, pool=pool))
        return link

    @property
    def bytes_in_use(self) -> int:
        """Host bytes that hold saved tensors."""
        return sum(link.pool.bytes_in_use for link in self._all())

    @property
    def reserved_bytes(self) -> int:
        """Host bytes in slabs."""
        return sum(link.pool.reserved_bytes for link in self._all())

    def close(self) -> None:
        """Give the host memory up; what live graphs still need stays until they drop it."""
        for link in self._all():
            link.pool.close()
            link.transfer.free_slabs()

    def _all(self) -> tuple[Link, ...]:
        # A copy: another thread may bring a device at any moment.
        return tuple(self._links.values())

    def _headroom(self) -> int | None:
        rooms = [self._system_headroom()]
        if self._policy.max_host_bytes is not None:
            rooms.append(self._policy.max_host_bytes - self.reserved_bytes)
        limited = [room for room in rooms if room is not None]
        return min(limited) if limited else None
