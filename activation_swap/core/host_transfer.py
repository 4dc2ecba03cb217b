# SPDX-License-Identifier: Apache-2.0
"""The transfer of a CPU: the same rules with synchronous copies into separate buffers."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING

import torch

from activation_swap.core.torch_private import copy_all
from activation_swap.core.transfer import Fence, pair

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from activation_swap._overlap import Overlap
    from activation_swap.core.transfer import Move

__all__ = ["HostTransfer"]


class HostTransfer:
    """Copies between two places of ordinary memory.

    It makes a model on the CPU run through every state that an accelerator runs through, so that
    all rules but the overlap itself are tested where there is no accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlaps: list[Overlap] = []
        self._sequence = count()

    def compute_stream(self) -> None:
        """Return ``None``: a CPU has no streams."""

    def on(self, stream: None) -> nullcontext[None]:  # noqa: ARG002 - protocol
        """Return an empty context."""
        return nullcontext()

    def allocate_slab(self, nbytes: int) -> torch.Tensor:
        """Return ``uint8[nbytes]`` of pageable memory."""
        # Named, since torch.set_default_device may name another.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free_slabs(self) -> None:
        """Do nothing: freed pageable memory is the allocator's."""

    def offload(
        self,
        moves: Sequence[Move],
        *,
        stream: None,  # noqa: ARG002 - protocol
        after: Iterable[Fence],  # noqa: ARG002 - complete by construction
    ) -> Fence:
        """Copy each device tensor into its host tensors."""
        hosts, devices = pair(moves)
        copy_all(hosts, devices)
        return Fence("d2h", next(self._sequence), None)

    def reload(
        self,
        moves: Sequence[Move],
        *,
        stream: None,  # noqa: ARG002 - protocol
        after: Iterable[Fence],  # noqa: ARG002 - complete by construction
    ) -> Fence:
        """Copy each device tensor from its host tensors."""
        hosts, devices = pair(moves)
        copy_all(devices, hosts)
        return Fence("h2d", next(self._sequence), None)

    def wait(self, stream: None, fence: Fence) -> None:
        """Do nothing: the copy is complete."""

    def lend(self, tensor: torch.Tensor, *, owner: None, reader: None) -> None:
        """Do nothing: a CPU has no streams, and frees memory when its last reader is done."""

    def capturing(self) -> bool:
        """Return ``False``."""
        return False
