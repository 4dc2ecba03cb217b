# SPDX-License-Identifier: Apache-2.0
"""What autograd holds in place of the tensors that an attention saves."""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from activation_swap.core.group import GroupState
from activation_swap.core.torch_private import negative_view
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from activation_swap.core.saved_storage import SavedStorage
    from activation_swap.errors import ActivationSwapError

__all__ = ["KeptTensor", "PackedTensor", "changed_in_place", "unpack", "view_of"]

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


def view_of(storage: SavedStorage, tensor: torch.Tensor) -> View | None:
    """Return how a save differs from the form of its storage; most do not, and are all of it."""
    size, stride, dtype, neg = tensor.size(), tensor.stride(), tensor.dtype, tensor.is_neg()
    if size == storage.size and stride == storage.stride and dtype is storage.dtype and not neg:
        return None
    return View(dtype, size, stride, tensor.storage_offset(), tensor.is_conj(), neg)


class PackedTensor:
    """Stands for a tensor that may be on the host.

    Args:
        storage: The tensor's.
        tensor: What is saved.
        view: See :func:`view_of`.
    """

    __slots__ = ("_index", "_storage", "_view")

    def __init__(self, storage: SavedStorage, tensor: torch.Tensor, view: View | None) -> None:
        self._storage = storage
        self._view = view
        aliases = storage.aliases
        if aliases is not None:
            self._index = len(aliases)
            aliases.append((tensor.detach(), tensor._version))

    def watch(self, alias: torch.Tensor, version: int) -> bool:
        """Compare one more version at the release, and hold ``alias`` until then.

        Returns:
            Whether that ends with the offload.
        """
        aliases = self._storage.aliases
        if aliases is not None:
            aliases.append((alias, version))
        return True

    def unpack(self) -> torch.Tensor:
        """Return the tensor with its own size, stride and offset. Repeatable, on any thread.

        Raises:
            InPlaceChangeError: The tensor was changed in place before its copy was complete.
        """
        storage = self._storage
        group = storage.group
        if group.backward_pending:
            group.engine.begin_backward(group)
        aliases = storage.aliases
        if aliases is not None:
            alias, version = aliases[self._index]
            if alias._version != version:
                raise changed_in_place(group.fqn, alias)
            # Whoever replaces its `.data` now must not replace what the recorder knows.
            return alias.detach() if group.state is GroupState.RECORDING else alias
        data = storage.reloaded
        if data is None:
            raise group.impossible(asked="unpack")
        transfer = group.link.transfer
        stream = transfer.compute_stream()
        if stream != group.stream:
            # An operation on a stream of its own, whose backward is there, too. The stream that
            # owns the memory must not reuse it before that has read it.
            transfer.lend(data, owner=group.stream, reader=stream)
        return data if self._view is None else self._view.of(data)


class KeptTensor(tuple[str, torch.Tensor, int]):
    """Stands for a tensor that stays on the device: (name of the attention, alias, version).

    The version is that at the save. The alias must not carry the saved tensor's own graph: a node
    that saves its output would keep itself alive for good. A tuple, since making one runs no Python
    code: twenty for each attention.
    """

    __slots__ = ()

    def watch(self, _alias: torch.Tensor, _version: int) -> bool:
        """Return ``False``: it does not move, and holds nothing else."""
        return False

    def unpack(self) -> torch.Tensor:
        """Return an alias of the saved tensor.

        Raises:
            InPlaceChangeError: The tensor was changed in place since it was saved.
        """
        fqn, alias, version = self
        if alias._version != version:
            raise changed_in_place(fqn, alias)
        return alias


def changed_in_place(fqn: str, alias: torch.Tensor) -> ActivationSwapError:
    """Return the error of an attention's saved tensor that has another version than when saved."""
    shape = ", ".join(map(str, alias.size()))
    return Reason.SAVED_TENSOR_CHANGED.error(
        where=fqn,
        found=f"{str(alias.dtype).removeprefix('torch.')}[{shape}] at version {alias._version}",
    )
