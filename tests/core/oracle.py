# SPDX-License-Identifier: Apache-2.0
"""An account of what attention saves that shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Saves", "eligible_bytes", "saves_of"]


@dataclass
class Saves:
    """What one attention call saved: bytes of each storage that may move, by address."""

    moving: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, int] = field(default_factory=dict)
    arguments: dict[int, int] = field(default_factory=dict)
    elsewhere: dict[int, int] = field(default_factory=dict)
    packs: int = 0


def saves_of(model: Any, run: Callable[[], Any]) -> list[Saves]:
    """Return what each attention of a plain model saves while ``run()`` runs its forward.

    Everything that is saved is held until the end, so that an address is one storage.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: list[torch.Tensor] = []
    calls = [Saves() for _ in model.model.layers]
    handles = []
    for call, layer in zip(calls, model.model.layers, strict=True):
        context: list[Any] = []

        def before(
            _module: Any,
            _args: Any,
            kwargs: dict[str, Any],
            *,
            call: Saves = call,
            context: list[Any] = context,
        ) -> None:
            borrowed = [*kwargs["position_embeddings"], kwargs.get("attention_mask")]
            addresses = {t.untyped_storage().data_ptr() for t in borrowed if t is not None}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                held.append(tensor.detach())
                storage = tensor.untyped_storage()
                kind = call.moving
                if storage.data_ptr() in parameters:
                    kind = call.parameters
                elif tensor.device != model.device:
                    kind = call.elsewhere  # the random state of a fused kernel, say
                elif storage.data_ptr() in addresses:
                    kind = call.arguments
                if storage.nbytes():
                    kind[storage.data_ptr()] = storage.nbytes()
                call.packs += 1
                return tensor.detach()

            context.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            context[-1].__enter__()

        def after(*_: Any, context: list[Any] = context) -> None:
            context.pop().__exit__(None, None, None)

        handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(after))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def eligible_bytes(model: Any, run: Callable[[], Any]) -> list[int]:
    """Return the bytes that each attention of a plain model saves and that may move."""
    return [sum(call.moving.values()) for call in saves_of(model, run)]
