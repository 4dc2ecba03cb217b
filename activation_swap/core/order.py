"""In which order groups move: the part of a swap that knows of layers or of microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from activation_swap._stats import KeepReason
    from activation_swap.core.group import Group

__all__ = ["Admission", "SwapOrder"]


@dataclass(frozen=True, slots=True)
class Admission:
    """A call of an attention whose saved tensors are taken.

    Attributes:
        previous: The group whose backward follows this call's, or ``None`` for the first.
    """

    previous: Group | None


class SwapOrder(Protocol):
    """Decides for each attention call whether its group is taken, kept, and what it releases."""

    def admit(self, index: int) -> Admission | None:
        """Begin the call of attention number ``index`` on this thread; ``None`` passes it by."""

    def keep(self, group: Group) -> KeepReason | None:
        """Say why a recorded group stays on the device, or ``None`` to move it."""

    def sealed(self, group: Group) -> None:
        """End the call: the group is kept, or its offload is launched."""
