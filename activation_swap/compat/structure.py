# SPDX-License-Identifier: Apache-2.0
"""Where a Qwen3-MoE model keeps its decoder layers and their attention; reads, never judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from activation_swap.compat.classes import peel

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ATTENTION", "LAYERS", "STACK", "LayerSlot", "Structure", "read_structure"]

STACK: Final = "model"
LAYERS: Final = "layers"
ATTENTION: Final = "self_attn"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerSlot:
    """One entry of the container of layers.

    Attributes:
        fqn: Name of the entry in the model.
        layer: The decoder layer inside any wrapper, or whatever is there.
        attention: Its attention inside any wrapper, or ``None``.
        owners: Modules that call the attention, outermost first, wrappers included.
    """

    fqn: str
    layer: Any
    attention: Any
    owners: tuple[nn.Module, ...]

    @property
    def attention_fqn(self) -> str:
        """Name of the attention in the model."""
        return f"{self.fqn}.{ATTENTION}"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Structure:
    """The parts of a model that matter here, as found. A part that is absent is ``None``.

    Attributes:
        model: The model that was passed, inside any wrapper.
        stack: The model without head, inside any wrapper.
        container: The container of the decoder layers.
        slots: Its entries, without the placeholders of a pruned pipeline stage.
    """

    model: nn.Module
    stack: Any
    container: Any
    slots: tuple[LayerSlot, ...]


def read_structure(model: nn.Module, *, pipelined: bool) -> Structure:
    """Read where the decoder layers of a model are.

    Args:
        model: A causal language model of the Qwen3-MoE family, possibly inside a wrapper.
        pipelined: Whether the model may be a pruned pipeline stage, in which ``None`` and
            ``nn.Identity`` stand for layers of other stages.

    Returns:
        What was found, in order.
    """
    models = peel(model)
    stacks = peel(getattr(models[-1], STACK, None))
    container = getattr(stacks[-1], LAYERS, None)
    slots = []
    for key, entry in _entries(container):
        if pipelined and (entry is None or type(entry) is nn.Identity):
            continue
        layers = peel(entry)
        attentions = peel(getattr(layers[-1], ATTENTION, None))
        chain = (*models, *stacks, *layers, *attentions[:-1])
        slots.append(
            LayerSlot(
                fqn=f"{STACK}.{LAYERS}.{key}",
                layer=layers[-1],
                attention=attentions[-1],
                owners=tuple(part for part in chain if isinstance(part, nn.Module)),
            )
        )
    return Structure(
        model=models[-1],
        stack=stacks[-1],
        container=container,
        slots=tuple(slots),
    )


def _entries(container: Any) -> Iterable[tuple[object, nn.Module | None]]:
    if isinstance(container, nn.ModuleDict):
        return container.items()
    if isinstance(container, nn.ModuleList):
        return enumerate(container)
    return ()
