# SPDX-License-Identifier: Apache-2.0
"""Which storages an attention saves, and which are weights, told without the package's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

__all__ = ["AttentionCensus", "WeightWatch"]


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside of DTensors and asynchronous results."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.detach().__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from _plain(inner.detach())


def _identities(tensors: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """Return storages by identity: not by address, which FSDP2 frees and refills."""
    return {
        plain.untyped_storage()._cdata: plain.untyped_storage()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for plain in _plain(tensor)
    }


class WeightWatch:
    """Remembers the storages of an attention's weights as they are while it runs.

    FSDP2 shows the gathered weights only inside of the module that it wraps, so that each module
    inside of the attention is asked when it begins.
    """

    def __init__(self, attention: nn.Module) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        for module in attention.modules():
            module.register_forward_pre_hook(self._collect)

    def _collect(self, module: nn.Module, _args: Any) -> None:
        self.storages |= _identities(module.parameters())


class AttentionCensus:
    """Adds up the storages that one attention saves and that nothing else owns.

    Args:
        attention: A module that is not swapped.
        weights: Its weights.
    """

    def __init__(self, attention: nn.Module, weights: WeightWatch) -> None:
        self.nbytes: list[int] = []
        self._weights = weights
        self._casts: set[torch.Size] = set()
        self._saved: list[torch.Tensor] = []
        self._arguments: tuple[Any, ...] = ()
        self._hooks: Any = None
        attention.register_forward_pre_hook(self._before, with_kwargs=True)
        attention.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # Asked here: inside of an operation autocast is off. It caches the casts of what trains.
        self._casts = _shapes_of_casts(module) if torch.is_autocast_enabled("cpu") else set()
        self._saved = []
        self._arguments = tuple(tree_leaves((args, kwargs)))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        if tensor.shape not in self._casts:
            self._saved.append(alias)
        return alias

    def _after(self, *_: Any) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        borrowed = _identities(
            leaf
            for leaf in self._arguments
            if isinstance(leaf, torch.Tensor) and not leaf.requires_grad
        )
        saved = _identities(self._saved)
        own = saved.keys() - self._weights.storages.keys() - borrowed.keys()
        self.nbytes.append(sum(saved[identity].nbytes() for identity in own))
        self._saved = []
        self._arguments = ()


def _shapes_of_casts(attention: nn.Module) -> set[torch.Size]:
    """Return the shapes of trainable weights: no activation of these models has one of them."""
    weights = [weight for weight in attention.parameters() if weight.requires_grad]
    return {shape for w in weights for shape in (w.shape, torch.Size(reversed(w.shape)))}
