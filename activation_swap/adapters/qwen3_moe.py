# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Transformers' Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from activation_swap._site import Site
from activation_swap.adapters.adapter import Inspection
from activation_swap.compat.facts import CACHE_ARGUMENTS, MODEL_CLASS, RETURN_ARITY, CheckpointFlag
from activation_swap.compat.release import installed_release, read_release, untested_notice

if TYPE_CHECKING:
    from torch import nn

    from activation_swap._config import TrainingSetup

__all__ = ["Qwen3MoeAttention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeAttention:
    """Finds the ``self_attn`` of every decoder layer of a ``Qwen3MoeForCausalLM``.

    Attributes:
        transformers_version: Release whose facts must hold, or ``None`` for the imported one.
    """

    transformers_version: str | None = None
    mode: ClassVar[str] = "attention"
    model_classes: ClassVar[tuple[str, ...]] = (MODEL_CLASS,)

    def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
        """Look at a model or a pipeline stage of it. See :meth:`Adapter.inspect`."""
        # Here, not above: importing the package, and applying "none", import no torch.
        from activation_swap.compat.probe import probe  # noqa: PLC0415

        version, release = read_release(self.transformers_version or installed_release())
        if version is None:
            return Inspection(sites=(), checks=(release,))
        found = probe(model, version=version, pipelined=setup.pp_size > 1)
        sites = tuple(
            Site(
                fqn=slot.attention_fqn,
                module=slot.attention,
                owners=slot.owners,
                checkpoint_flag_owner=(
                    slot.layer if found.flag is CheckpointFlag.LAYER else found.stack
                ),
                cache_arguments=CACHE_ARGUMENTS,
                returns=RETURN_ARITY.at(version),
            )
            for slot in found.slots
        )
        notice = untested_notice(version)
        return Inspection(
            sites=sites,
            checks=(release, *found.checks),
            notices=() if notice is None else (notice,),
        )
