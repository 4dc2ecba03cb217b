# SPDX-License-Identifier: Apache-2.0
"""Every fact about Qwen3-MoE, confirmed on the live model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from activation_swap._check import Check, compare
from activation_swap.compat.classes import original_class, qualified_name
from activation_swap.compat.facts import (
    ATTENTION_CLASS,
    ATTENTION_PARTS,
    ATTENTION_SIGNATURE,
    CHECKPOINT_FLAG,
    CHECKPOINT_SITE,
    LAYER_CLASS,
    LAYER_CONTAINER,
    STACK_CLASS,
    CheckpointFlag,
    CheckpointSite,
    Fact,
)
from activation_swap.compat.forward import foreign_forward, signature_of
from activation_swap.compat.structure import LAYERS, STACK, LayerSlot, Structure, read_structure
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from packaging.version import Version

__all__ = ["Probe", "probe"]

_MODULE_DICT: Final = "torch.nn.modules.container.ModuleDict"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Probe:
    """What was found on a model, and how it compares with the facts of its release.

    Attributes:
        slots: The decoder layers with an attention, in order.
        stack: The model without head.
        flag: Which module tells whether a layer is recomputed.
        checks: One for each fact.
    """

    slots: tuple[LayerSlot, ...]
    stack: Any
    flag: CheckpointFlag
    checks: tuple[Check, ...]


def probe(model: nn.Module, *, version: Version, pipelined: bool) -> Probe:
    """Compare a live Qwen3-MoE model with the facts of a Transformers release.

    Args:
        model: The model, with its exact class already established.
        version: The release whose facts are to hold.
        pipelined: Whether ``model`` may be a pruned pipeline stage: fewer layers, a ``ModuleDict``
            or placeholders among them, no embedding, norm or head.

    Returns:
        The layers, with one check for each fact. Nothing is raised and nothing changed.
    """
    structure = read_structure(model, pipelined=pipelined)
    slots = tuple(slot for slot in structure.slots if isinstance(slot.attention, nn.Module))
    checks = (
        _parts_present(structure),
        _class_of(STACK_CLASS, version, [(STACK, structure.stack)]),
        _container(structure, version, pipelined=pipelined),
        _class_of(LAYER_CLASS, version, [(slot.fqn, slot.layer) for slot in structure.slots]),
        _class_of(
            ATTENTION_CLASS, version, [(slot.attention_fqn, slot.attention) for slot in slots]
        ),
        _no_misplaced_attention(structure, version),
        _layer_count(structure, pipelined=pipelined),
        _layer_order(slots, pipelined=pipelined),
        _signature(slots, version),
        _attention_parts(slots, version),
        _own_forward(slots),
        _checkpoint_site(structure, version),
        _checkpoint_flag(structure, version),
        _not_quantized(structure.model),
    )
    flag = CHECKPOINT_FLAG.at(version)
    return Probe(slots=slots, stack=structure.stack, flag=flag, checks=checks)


def _parts_present(structure: Structure) -> Check:
    parts = {STACK: structure.stack}
    if isinstance(structure.stack, nn.Module):
        parts[f"{STACK}.{LAYERS}"] = structure.container
    for slot in structure.slots:
        parts[slot.fqn] = slot.layer
        if isinstance(slot.layer, nn.Module):
            parts[slot.attention_fqn] = slot.attention
    return compare(
        Reason.MISSING_PART,
        "parts of the model",
        expected="a module",
        found={name: _presence(part) for name, part in parts.items()},
    )


def _release(version: Version) -> str:
    return f"transformers {version}"


def _presence(part: object) -> str:
    if isinstance(part, nn.Module):
        return "a module"
    return "nothing" if part is None else qualified_name(type(part))


def _class_of(fact: Fact[str], version: Version, parts: Sequence[tuple[str, Any]]) -> Check:
    return compare(
        Reason.FOREIGN_CLASS,
        fact.name,
        source=_release(version),
        expected=fact.at(version),
        found={
            fqn: _class_name(part, fact.at(version))
            for fqn, part in parts
            if isinstance(part, nn.Module)
        },
    )


def _class_name(module: nn.Module, expected: str) -> str:
    cls = original_class(type(module))
    name = qualified_name(cls)
    # A class that is only called so: its module holds another one by this name.
    if name == expected and getattr(sys.modules[cls.__module__], cls.__qualname__, None) is not cls:
        return f"another class of the name {name}"
    return name


def _container(structure: Structure, version: Version, *, pipelined: bool) -> Check:
    expected = LAYER_CONTAINER.at(version)
    found = {}
    if isinstance(structure.container, nn.Module):
        kind = qualified_name(type(structure.container))
        # A stage may key its layers by their index in the whole model.
        found = {f"{STACK}.{LAYERS}": expected if pipelined and kind == _MODULE_DICT else kind}
    return compare(
        Reason.LAYER_CONTAINER,
        "container of the layers",
        source=_release(version),
        expected=expected,
        found=found,
    )


def _no_misplaced_attention(structure: Structure, version: Version) -> Check:
    known = {id(slot.attention) for slot in structure.slots}
    attention = ATTENTION_CLASS.at(version)
    found = {
        fqn: "an attention module"
        for fqn, module in structure.model.named_modules()
        if qualified_name(original_class(type(module))) == attention and id(module) not in known
    }
    return compare(
        Reason.MISPLACED_ATTENTION, "attention elsewhere", expected="nothing", found=found
    )


def _layer_count(structure: Structure, *, pipelined: bool) -> Check:
    found = {}
    if not pipelined and isinstance(structure.container, nn.ModuleList):
        found = {f"{STACK}.{LAYERS}": str(len(structure.slots))}
    config: Any = structure.model.config
    expected = str(config.num_hidden_layers)
    return compare(
        Reason.LAYER_COUNT,
        "number of layers",
        source="config.num_hidden_layers",
        expected=expected,
        found=found,
    )


def _layer_order(slots: Sequence[LayerSlot], *, pipelined: bool) -> Check:
    indices = [getattr(slot.attention, "layer_idx", None) for slot in slots]
    known = [index for index in indices if isinstance(index, int)]
    right = sorted(set(known)) if pipelined and len(known) == len(slots) else range(len(slots))
    return compare(
        Reason.LAYER_INDEX,
        "layer_idx of the attention",
        source="in ascending order",
        expected=_ranges(right),
        found={f"{STACK}.{LAYERS}": _ranges(indices)} if slots else {},
    )


def _ranges(indices: Iterable[object]) -> str:
    """Render ``0, 1, 2, 5`` as ``0-2, 5``, in the order given."""
    runs = [
        [index for _, index in run]
        for _, run in groupby(
            enumerate(indices),
            key=lambda pair: pair[1] - pair[0] if isinstance(pair[1], int) else pair[0],
        )
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _signature(slots: Sequence[LayerSlot], version: Version) -> Check:
    return compare(
        Reason.ATTENTION_SIGNATURE,
        ATTENTION_SIGNATURE.name,
        source=_release(version),
        expected=ATTENTION_SIGNATURE.at(version),
        found={slot.attention_fqn: signature_of(type(slot.attention)) for slot in slots},
    )


def _attention_parts(slots: Sequence[LayerSlot], version: Version) -> Check:
    names = ATTENTION_PARTS.at(version)
    return compare(
        Reason.ATTENTION_PARTS,
        ATTENTION_PARTS.name,
        source=_release(version),
        expected=", ".join(names),
        found={
            slot.attention_fqn: ", ".join(
                name for name in names if _has_weight(getattr(slot.attention, name, None))
            )
            for slot in slots
        },
    )


def _has_weight(part: object) -> bool:
    # PEFT, FSDP2 and TP replace or rename what is below; each keeps a weight to be read here.
    return isinstance(part, nn.Module) and isinstance(getattr(part, "weight", None), torch.Tensor)


def _own_forward(slots: Sequence[LayerSlot]) -> Check:
    return compare(
        Reason.REPLACED_FORWARD,
        "forward of the attention",
        expected="as transformers defines it",
        found={
            slot.attention_fqn: foreign_forward(slot.attention, package="transformers")
            or "as transformers defines it"
            for slot in slots
        },
    )


def _checkpoint_site(structure: Structure, version: Version) -> Check:
    return compare(
        Reason.CHECKPOINT_SITE,
        CHECKPOINT_SITE.name,
        source=_release(version),
        expected=CHECKPOINT_SITE.at(version),
        found={
            slot.fqn: _site_of(original_class(type(slot.layer)))
            for slot in structure.slots
            if isinstance(slot.layer, nn.Module)
        },
    )


def _site_of(layer_class: type) -> str:
    base = layer_class.__mro__[1]
    if base is nn.Module:
        return CheckpointSite.MODEL_LOOP
    if base.__name__ == "GradientCheckpointingLayer":
        if "__call__" in vars(base):
            return CheckpointSite.LAYER_CALL
        if "__init_subclass__" in vars(base):
            return CheckpointSite.LAYER_FORWARD
    return f"unknown, in {qualified_name(base)}"


def _checkpoint_flag(structure: Structure, version: Version) -> Check:
    return compare(
        Reason.CHECKPOINT_FLAG,
        CHECKPOINT_FLAG.name,
        source=_release(version),
        expected=CHECKPOINT_FLAG.at(version),
        found={
            slot.fqn: _flag_owner(slot.layer, structure.stack)
            for slot in structure.slots
            if isinstance(slot.layer, nn.Module)
        },
    )


def _flag_owner(layer: nn.Module, stack: object) -> str:
    if isinstance(getattr(layer, "gradient_checkpointing", None), bool):
        return CheckpointFlag.LAYER
    if isinstance(getattr(stack, "gradient_checkpointing", None), bool):
        return CheckpointFlag.STACK
    return "nowhere"


def _not_quantized(model: nn.Module) -> Check:
    quantizer = getattr(model, "hf_quantizer", None)
    return compare(
        Reason.QUANTIZED_MODEL,
        "quantization",
        expected="none",
        found={"model": "none" if quantizer is None else qualified_name(type(quantizer))},
    )
