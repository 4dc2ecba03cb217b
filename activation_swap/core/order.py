# SPDX-License-Identifier: Apache-2.0
"""In which order groups move: the part of a swap that knows of layers or of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from activation_swap._stats import KeepReason
    from activation_swap.core.group import Group

__all__ = ["SwapOrder"]


class SwapOrder(Protocol):
    """Decides for each attention call whether its group is taken, kept, and what it releases.

    The methods are called in this order, by the thread that runs the forward.
    """

    def admit(self, index: int) -> bool:
        """Begin the call of attention number ``index``; ``False`` passes it by."""

    def previous(self) -> Group | None:
        """Return the group whose backward follows that of this call, or ``None`` for the first."""

    def keep(self, group: Group) -> KeepReason | None:
        """Say why the recorded group stays on the device, or ``None`` to move it."""

    def sealed(self, group: Group) -> None:
        """End the call: the group is kept, or its offload is launched."""
