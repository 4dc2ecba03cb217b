# SPDX-License-Identifier: Apache-2.0
"""The storages that one attention call saved, and the state they share."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from weakref import ref

from activation_swap.errors import Reason

if TYPE_CHECKING:
    from activation_swap.core.engine import Engine
    from activation_swap.core.link import Link
    from activation_swap.core.pinned_pool import HostBlock
    from activation_swap.core.saved_storage import SavedStorage
    from activation_swap.core.transfer import Copy
    from activation_swap.errors import ActivationSwapError

__all__ = ["Group", "GroupState"]


class GroupState(Enum):
    """Where the eligible storages of a group are."""

    RECORDING = auto()
    """The attention's forward runs; the graph and the recorder hold the tensors."""
    RESIDENT = auto()
    """On the device, for good: never offloaded, or reloaded."""
    OFFLOADING = auto()
    """On the device; the D2H copy is launched, and compute is not yet ordered after it."""
    OFFLOADED = auto()
    """On the host alone."""
    RELOADING = auto()
    """On the host; the H2D copy is launched, and compute is not yet ordered after it."""

    # Members are singletons. Enum's own hash is Python code, and every step asks for it twice.
    __hash__ = object.__hash__


_NEXT = {
    GroupState.RECORDING: {GroupState.RESIDENT, GroupState.OFFLOADING},
    GroupState.OFFLOADING: {GroupState.OFFLOADED, GroupState.RESIDENT},
    GroupState.OFFLOADED: {GroupState.RELOADING},
    GroupState.RELOADING: {GroupState.RESIDENT},
    GroupState.RESIDENT: set(),
}


class Group:
    """The storages that one call of one attention saved, moved together.

    A group lives as long as one of its storages: handles in the autograd graph own the storages,
    storages own the group, and the group knows its storages weakly. Dropping the graph frees all.

    Attributes:
        fqn: Name of the attention.
        index: Position of the attention in the forward.
        link: Transfer and pool of the device that the attention computes on.
        previous: Weak reference to the group whose backward follows this one's, or ``None``.
        state: See :class:`GroupState`.
        backward_pending: Whether none of its storages was unpacked yet: the next unpack begins
            the group's backward.
        storages: Weak references to the storages, once recorded.
        device_bytes: Sum of the storages' bytes.
        stream: Compute stream of the forward, which owns the device memory.
        block: Host bytes, while they hold the data.
        copy: The copy in flight, if any.
    """

    __slots__ = (
        "__weakref__",
        "backward_pending",
        "block",
        "copy",
        "device_bytes",
        "engine",
        "fqn",
        "index",
        "link",
        "previous",
        "state",
        "storages",
        "stream",
    )

    def __init__(
        self, engine: Engine, *, fqn: str, index: int, link: Link, previous: Group | None
    ) -> None:
        self.engine = engine
        self.fqn = fqn
        self.index = index
        self.link = link
        self.previous = None if previous is None else ref(previous)
        self.state = GroupState.RECORDING
        self.backward_pending = True
        self.storages: list[ref[SavedStorage]] = []
        self.device_bytes = 0
        self.stream: Any = None
        self.block: HostBlock | None = None
        self.copy: Copy | None = None

    def move_to(self, state: GroupState) -> None:
        """Change the state.

        Raises:
            SwapStateError: The step is not a legal one.
        """
        if state not in _NEXT[self.state]:
            raise self.impossible(asked=f"a step to {state.name}")
        self.state = state

    def impossible(self, *, asked: str) -> ActivationSwapError:
        """Return the error for a step that this group's state does not allow."""
        return Reason.ILLEGAL_TRANSITION.error(
            where=self.fqn, found=f"{asked} in state {self.state.name}"
        )

    def live_storages(self) -> list[SavedStorage]:
        """Return the storages that the graph still needs."""
        return [storage for known in self.storages if (storage := known()) is not None]

    def drop_host_bytes(self) -> None:
        """Give the block back to its pool: another group may have the bytes, behind its fences."""
        self.block = None
        for storage in self.live_storages():
            storage.host = ()

    def __del__(self) -> None:
        # Runs in whichever thread drops the graph, maybe inside of another engine's lock.
        self.engine.forget(self)
