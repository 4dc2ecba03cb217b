# SPDX-License-Identifier: Apache-2.0
"""What autograd holds in place of the tensors that an attention saves."""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from activation_swap.core.torch_private import negative_view
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from activation_swap.core.saved_storage import SavedStorage

__all__ = ["PackedTensor", "View", "unpack"]

unpack = methodcaller("unpack")
"""The unpack hook: gives autograd back what one of the ``pack`` hooks took."""


class View(NamedTuple):
    """The geometry of a save that has not the form of its storage, and its two lazy bits."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any
    conj: bool
    neg: bool

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the save as a view of all of its storage's data."""
        if self.dtype is not data.dtype:
            # A reinterpreting view. The storage may end with a part of an element.
            octets = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
            whole = octets.numel() // self.dtype.itemsize * self.dtype.itemsize
            data = octets[:whole].view(self.dtype)
        view = data.as_strided(self.size, self.stride, self.offset)
        if self.conj:
            view = view.conj()
        return negative_view(view) if self.neg else view


class PackedTensor:
    """Stands for one tensor that autograd saves, whether it stays or moves.

    Made at the save, and settled when its attention ends: all that an attention saved is sorted in
    one go. It has no ``__init__``: thirty are made for each attention, between kernels.

    Attributes:
        fqn: Name of the attention.
        alias: The saved tensor; once settled, a detached alias of it, or ``None`` where the storage
            holds that. An alias must not carry the tensor's own graph: a node that saves its output
            would keep itself alive for good.
        version: Of the tensor at the save. Autograd stops comparing versions once hooks are on.
        storage: What moves, where ``alias`` is ``None``.
        index: Of the alias in the storage.
        view: How it differs from the form of the storage, or ``None``.
    """

    __slots__ = ("alias", "fqn", "index", "storage", "version", "view")

    alias: torch.Tensor | None
    fqn: str
    index: int
    storage: SavedStorage
    version: int
    view: View | None

    def unpack(self) -> torch.Tensor:
        """Return the tensor with its own size, stride and offset. Repeatable, on any thread.

        Raises:
            InPlaceChangeError: The tensor was changed in place since it was saved; where it moves,
                before its copy was complete.
        """
        alias = self.alias
        if alias is not None:
            if alias._version != self.version:
                raise _changed_in_place(self.fqn, alias)
            return alias
        storage = self.storage
        group = storage.group
        if group.backward_pending:
            group.engine.begin_backward(group)
        aliases = storage.aliases
        if aliases is not None:
            alias, version = aliases[self.index]
            if alias._version != version:
                raise _changed_in_place(self.fqn, alias)
            return alias
        data = storage.reloaded
        if data is None:
            raise group.impossible(asked="unpack")
        transfer = group.link.transfer
        stream = transfer.compute_stream()
        if stream != group.stream:
            # An operation on a stream of its own, whose backward is there, too. The stream that
            # owns the memory must not reuse it before that has read it.
            transfer.lend(data, owner=group.stream, reader=stream)
        return data if self.view is None else self.view.of(data)


def _changed_in_place(fqn: str, alias: torch.Tensor) -> Exception:
    shape = ", ".join(map(str, alias.size()))
    return Reason.SAVED_TENSOR_CHANGED.error(
        where=fqn,
        found=f"{str(alias.dtype).removeprefix('torch.')}[{shape}] at version {alias._version}",
    )
