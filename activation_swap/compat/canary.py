# SPDX-License-Identifier: Apache-2.0
"""Tells whether a Transformers release is supported, or which facts to add for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from activation_swap._check import Check
from activation_swap.compat import facts
from activation_swap.compat.facts import RETURN_ARITY, TESTED, Fact, spelled
from activation_swap.compat.probe import probe
from activation_swap.compat.release import installed_release, read_release, untested_notice
from activation_swap.core.call_guard import arity_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from packaging.version import Version
    from torch import nn

    from activation_swap.compat.structure import LayerSlot

__all__ = ["main", "report", "tiny_model"]


def tiny_model() -> Any:
    """Build a Qwen3-MoE of two layers with the installed Transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - slow to import

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def report(model: nn.Module, *, version: Version) -> tuple[bool, str]:
    """Compare every fact with a live model, what its attention returns included.

    Args:
        model: A small model; one forward is run on it.
        version: The release that it was built with.

    Returns:
        Whether everything holds, and the text to print: "supported", or the rows to add.
    """
    found = probe(model, version=version, pipelined=False)
    checks = [*found.checks]
    if all(check.passed for check in checks):
        checks.append(_return_arity(model, found.slots, version))
    differences = [line for check in checks for line in _difference(check, version)]
    if differences:
        return False, "\n".join([f"transformers {version}: not supported yet", *differences])
    lines = [f"transformers {version}: supported"]
    if untested_notice(version) is not None:
        lines.append(f"  run the version matrix on it, then raise TESTED, now {spelled(TESTED)}")
    return True, "\n".join(lines)


def main() -> int:
    """Print the report of the installed Transformers and return the exit status."""
    version, release = read_release(installed_release())
    if version is None:
        sys.stdout.write(f"{release.rejection}\n")
        return 1
    supported, text = report(tiny_model(), version=version)
    sys.stdout.write(f"{text}\n")
    return 0 if supported else 1


def _return_arity(model: nn.Module, slots: Sequence[LayerSlot], version: Version) -> Check:
    outputs: dict[str, object] = {}
    handles = [
        slot.attention.register_forward_hook(
            lambda _, __, output, fqn=slot.attention_fqn: outputs.update({fqn: output})
        )
        for slot in slots
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    finally:
        for handle in handles:
            handle.remove()
    arity = RETURN_ARITY.at(version)
    errors = [arity_error(fqn, output, expected=arity) for fqn, output in outputs.items()]
    error = next(filter(None, errors), None)
    found = str(arity) if error is None else error.found
    return Check(subject=RETURN_ARITY.name, expected=str(arity), found=found, rejection=error)


def _difference(check: Check, version: Version) -> Iterator[str]:
    if check.rejection is None:
        return
    yield f"{check.rejection.code} {check.subject}, at {check.rejection.where}"
    yield f"  found    {check.found}"
    yield f"  expected {check.expected}"
    yield from (f"  also     {line}" for line in check.rejection.trace)
    for key, fact in vars(facts).items():
        if isinstance(fact, Fact) and fact.name == check.subject:
            since = f">={version.major}.{version.minor}.dev0"
            yield f'  add      {key}: Row(versions=SpecifierSet("{since}"), value={check.found!r})'
