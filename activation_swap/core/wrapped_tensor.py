# SPDX-License-Identifier: Apache-2.0
"""A saved tensor subclass, taken apart into plain tensors: DTensor and its like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WrappedTensor"]


class WrappedTensor:
    """What autograd holds in place of a traceable wrapper subclass.

    The inner tensors are packed each on its own. Since torch 2.12 the names that ``DTensor``
    flattens into include its mesh, which is no tensor: such attributes are kept as they are.

    Args:
        tensor: The subclass instance.
        pack: Packs one inner tensor and returns a handle with ``unpack()``.
    """

    __slots__ = ("_context", "_inner", "_others", "_size", "_stride", "_type")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
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

    def unpack(self) -> torch.Tensor:
        """Return the subclass around the unpacked inner tensors."""
        inner = {name: handle.unpack() for name, handle in self._inner.items()}
        inner.update(self._others)
        rebuilt: torch.Tensor = self._type.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return rebuilt
