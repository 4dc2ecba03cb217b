# SPDX-License-Identifier: Apache-2.0
"""The adapter: where the attention of a :class:`pebble.model.Pebble` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from activation_swap.adapters import Inspection, Site, compare
from activation_swap.errors import Reason
from pebble.model import PebbleAttention

if TYPE_CHECKING:
    from torch import nn

    from activation_swap import TrainingSetup

__all__ = ["PebbleAdapter", "adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PebbleAdapter:
    """Finds the attention of every block."""

    mode: ClassVar[str] = "attention"
    model_classes: ClassVar[tuple[str, ...]] = ("pebble.model.Pebble",)

    def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
        """Look at a model without changing it."""
        blocks = model.get_submodule("blocks")
        sites = tuple(
            Site(
                fqn=f"blocks.{name}.attention",
                module=block.get_submodule("attention"),
                # Everything that calls the attention: each is checked for compilation.
                owners=(model, block),
            )
            for name, block in blocks.named_children()
        )
        kinds = compare(
            Reason.FOREIGN_CLASS,
            "class of the attention",
            expected=PebbleAttention.__name__,
            found={site.fqn: type(site.module).__name__ for site in sites},
        )
        stages = compare(
            Reason.STAGES_WITHOUT_PIPELINE,
            "pipeline",
            expected="pp_size=1",
            found={"TrainingSetup": f"pp_size={setup.pp_size}"},
        )
        return Inspection(sites=sites, checks=(kinds, stages))


adapter = PebbleAdapter()
