# SPDX-License-Identifier: Apache-2.0
"""The hooks on an attention module: module-level objects, so that models copy and pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from activation_swap.core.warning import warn

if TYPE_CHECKING:
    from activation_swap.core.attention_calls import AttentionCalls

__all__ = ["AfterAttention", "BeforeAttention", "InertHook"]


class _Hook:
    """One of the two; a copy of it is inert, since a copied model is not swapped."""

    def __init__(self, calls: AttentionCalls, index: int, installation: object) -> None:
        self._calls = calls
        self._index = index
        self.installation = installation

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook(self._calls.fqn(self._index), speaks=isinstance(self, BeforeAttention))

    def __reduce__(self) -> tuple[type[InertHook], tuple[str, bool]]:
        return InertHook, (self._calls.fqn(self._index), isinstance(self, BeforeAttention))


class BeforeAttention(_Hook):
    """The forward pre-hook."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Begin the call; torch gives no keywords to a hook that was taken off during it."""
        if kwargs is not None:
            self._calls.enter(self._index, module, args, kwargs)


class AfterAttention(_Hook):
    """The forward hook, called always."""

    def __call__(self, _module: Any, _args: tuple[Any, ...], *kwargs_and_result: Any) -> None:
        """End the call; torch gives no keywords to a hook that was taken off during it."""
        self._calls.leave(self._index, kwargs_and_result[-1])


class InertHook:
    """What a copied or unpickled model carries: it does nothing, and says so once in training."""

    def __init__(self, fqn: str, speaks: bool) -> None:  # noqa: FBT001 - pickled by position
        self._fqn = fqn
        self._speaks = speaks

    def __call__(self, *_: Any) -> None:
        """Warn at the first training forward of a copy."""
        if self._speaks and torch.is_grad_enabled():
            self._speaks = False
            warn(
                f"{self._fqn} is part of a copy of a model under activation_swap: attention. The "
                "copy trains without it. Call registry.apply on the copy, or Swap.remove before "
                "copying.",
            )
