# SPDX-License-Identifier: Apache-2.0
"""A saved tensor subclass, taken apart into plain tensors: DTensor and its like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from activation_swap.core.packed_tensor import changed_in_place

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WrappedTensor"]


class WrappedTensor:
    """What autograd holds in place of a traceable wrapper subclass.

    The inner tensors are packed each on its own. Since torch 2.12 the names that ``DTensor``
    flattens into include its mesh, which is no tensor: such attributes are kept as they are.

    An in-place change of the wrapper is in its own version alone, and in no inner tensor's. So an
    alias of it is held as long as the inner tensors are on the device, and compared as theirs are.

    Args:
        fqn: Name of the attention.
        tensor: The subclass instance.
        pack: Packs one inner tensor and returns a handle with ``unpack()`` and ``watch()``.
    """

    __slots__ = (
        "_alias",
        "_context",
        "_fqn",
        "_inner",
        "_kept",
        "_others",
        "_size",
        "_stride",
        "_type",
        "_version",
    )

    def __init__(self, fqn: str, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        self._fqn = fqn
        self._version: int = tensor._version
        # Detached: the inner tensors of the saved object itself may carry its graph.
        tensor = tensor.detach()
        names, self._context = tensor.__tensor_flatten__()
        self._type = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._inner: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        for name in names:
            attribute = getattr(tensor, name)
            if isinstance(attribute, torch.Tensor):
                self._inner[name] = pack(attribute)
            else:
                self._others[name] = attribute
        self._alias = ref(tensor)
        self._kept: torch.Tensor | None = None
        self.watch(tensor, self._version)

    def watch(self, alias: torch.Tensor, version: int) -> bool:
        """Hold ``alias`` as long as an inner tensor is on the device.

        Returns:
            Whether that ends with the offload.
        """
        moves = [handle.watch(alias, version) for handle in self._inner.values()]
        if not all(moves):
            # What stays is held for good, and so may be changed at any time.
            self._kept = alias
        return all(moves)

    def unpack(self) -> torch.Tensor:
        """Return the subclass around the unpacked inner tensors.

        Raises:
            InPlaceChangeError: It was changed in place before its copy was complete.
        """
        alias = self._alias()
        if alias is not None and alias._version != self._version:
            raise changed_in_place(self._fqn, alias)
        inner = {name: handle.unpack() for name, handle in self._inner.items()}
        inner.update(self._others)
        rebuilt: torch.Tensor = self._type.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return rebuilt
