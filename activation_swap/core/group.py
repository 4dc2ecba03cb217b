"""What one attention call saved: its storages, their handles, and the state they share."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from activation_swap.errors import Reason

if TYPE_CHECKING:
    from activation_swap.core.engine import Engine
    from activation_swap.core.link import Link
    from activation_swap.core.pinned_pool import HostBlock
    from activation_swap.core.transfer import Copy

__all__ = ["Group", "GroupState", "KeptTensor", "Origin", "PackedTensor", "SavedStorage", "unpack"]


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
        order: Position of the attention in the forward.
        link: Transfer and pool of the device that the attention computes on.
        previous: Weak reference to the group whose backward follows this one's, or ``None``.
        state: See :class:`GroupState`.
        armed: Whether no tensor of this group was unpacked yet: the next unpack begins the
            group's backward.
        storages: Weak references to the storages, once recorded.
        device_bytes: Sum of the storages' bytes.
        stream: Compute stream of the forward, which owns the device memory.
        block: Host bytes, while they hold the data.
        copy: The copy in flight, if any.
    """

    __slots__ = (
        "__weakref__",
        "armed",
        "block",
        "copy",
        "device_bytes",
        "engine",
        "fqn",
        "link",
        "order",
        "previous",
        "state",
        "storages",
        "stream",
    )

    def __init__(
        self, engine: Engine, *, fqn: str, order: int, link: Link, previous: Group | None
    ) -> None:
        self.engine = engine
        self.fqn = fqn
        self.order = order
        self.link = link
        self.previous = None if previous is None else ref(previous)
        self.state = GroupState.RECORDING
        self.armed = True
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

    def impossible(self, *, asked: str) -> Exception:
        """Return the error for a step that this group's state does not allow."""
        return Reason.ILLEGAL_TRANSITION.error(
            where=self.fqn, found=f"{asked} in state {self.state.name}"
        )

    def live_storages(self) -> list[SavedStorage]:
        """Return the storages that the graph still needs."""
        return [storage for known in self.storages if (storage := known()) is not None]

    def __del__(self) -> None:
        self.engine.forget(self)


class SavedStorage:
    """One device storage that the graph needs in backward, however often it was saved.

    Attributes:
        group: The group it moves with.
        nbytes: Bytes on the device.
        dtype: Of the flat forms: that of the first save, or ``uint8`` where its size does not fit.
        narrow: Whether it crosses the link as the upper halves of its fp32 elements.
        link_bytes: Bytes that cross the link.
        link_dtype: Of the flat tensor that crosses the link.
        aliases: One (detached alias, version at save) per save while the original is on the
            device, ``None`` once it was given up. An alias, never the saved tensor: a node's own
            output would keep its graph alive for good. Autograd stops comparing versions once
            hooks are on, so that the handles do.
        flat: The reloaded data as a flat tensor, ``None`` before.
        offset: First byte in the group's host block.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "dtype",
        "flat",
        "group",
        "link_bytes",
        "link_dtype",
        "narrow",
        "nbytes",
        "offset",
    )

    def __init__(self, group: Group, nbytes: int, dtype: torch.dtype, *, narrow: bool) -> None:
        self.group = group
        self.nbytes = nbytes
        self.dtype = dtype if nbytes % dtype.itemsize == 0 else torch.uint8
        self.narrow = narrow
        self.link_bytes = nbytes // 2 if narrow else nbytes
        self.link_dtype = torch.bfloat16 if narrow else self.dtype
        self.aliases: list[tuple[torch.Tensor, int]] | None = []
        self.flat: torch.Tensor | None = None
        self.offset = 0

    def unchanged(self) -> bool:
        """Whether no save's tensor was changed in place since it was saved."""
        changed = [alias for alias, version in self.aliases or () if alias._version != version]
        return not changed

    def whole(self) -> torch.Tensor:
        """Return the original storage as a flat tensor that shares its memory."""
        if not self.aliases:
            raise self.group.impossible(asked="a copy of a storage that was given up")
        alias, _ = self.aliases[0]
        if alias.dtype is self.dtype:
            if alias.is_contiguous() and alias.numel() * alias.itemsize == self.nbytes:
                return alias.view(-1)
            return alias.as_strided((self.nbytes // alias.itemsize,), (1,), 0)
        return torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())


class PackedTensor:
    """What autograd holds in place of a tensor that may be on the host."""

    __slots__ = ("_dtype", "_index", "_offset", "_size", "_storage", "_stride")

    def __init__(self, storage: SavedStorage, tensor: torch.Tensor) -> None:
        aliases = storage.aliases
        self._storage = storage
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        if aliases is not None:
            self._index = len(aliases)
            aliases.append((tensor.detach(), tensor._version))

    def unpack(self) -> torch.Tensor:
        """Return the tensor with its own size, stride and offset. Repeatable, on any thread.

        Raises:
            InPlaceChangeError: The tensor was changed in place before its copy was complete.
        """
        storage = self._storage
        group = storage.group
        if group.armed:
            group.engine.begin_backward(group)
        aliases = storage.aliases
        if aliases is not None:
            alias, version = aliases[self._index]
            if alias._version != version:
                raise _changed_in_place(group.fqn, alias)
            return alias
        flat = storage.flat
        if flat is None:
            raise group.impossible(asked="unpack")
        if flat.dtype is not self._dtype:
            # Another dtype than the storage's first save: a reinterpreting view of it.
            flat = flat.view(self._dtype)
        return flat.as_strided(self._size, self._stride, self._offset)


class Origin:
    """Where the kept tensors of one attention call come from.

    The group is known weakly: it lives for its storages, and a kept tensor is none of them.
    """

    __slots__ = ("fqn", "group")

    def __init__(self, group: Group) -> None:
        self.fqn = group.fqn
        self.group = ref(group)


class KeptTensor:
    """What autograd holds in place of a tensor that stays on the device."""

    __slots__ = ("_alias", "_origin", "_version")

    def __init__(self, origin: Origin, alias: torch.Tensor, version: int) -> None:
        self._origin = origin
        self._alias = alias
        self._version = version

    def unpack(self) -> torch.Tensor:
        """Return an alias of the saved tensor.

        Raises:
            InPlaceChangeError: The tensor was changed in place since it was saved.
        """
        group = self._origin.group()
        if group is not None and group.armed:
            group.engine.begin_backward(group)
        alias = self._alias
        if alias._version != self._version:
            raise _changed_in_place(self._origin.fqn, alias)
        return alias


def unpack(packed: Any) -> Any:
    """Give autograd back what one of the ``pack`` hooks took: the unpack hook."""
    return packed.unpack()


def _changed_in_place(fqn: str, alias: torch.Tensor) -> Exception:
    shape = ", ".join(map(str, alias.size()))
    return Reason.SAVED_TENSOR_CHANGED.error(
        where=fqn,
        found=f"{str(alias.dtype).removeprefix('torch.')}[{shape}] at version {alias._version}",
    )
