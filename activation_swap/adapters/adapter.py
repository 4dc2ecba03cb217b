# SPDX-License-Identifier: Apache-2.0
"""What the registry asks of an adapter, and what an adapter answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from activation_swap._check import Check
    from activation_swap._config import TrainingSetup
    from activation_swap._site import Site

__all__ = ["Adapter", "Inspection"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Inspection:
    """What an adapter found on one model or stage module.

    Attributes:
        sites: Attention modules in the order of the forward; also those that a check refuses.
        checks: Everything that was looked at. One that failed refuses the model.
        notices: What to warn of when the swap is applied.
    """

    sites: tuple[Site, ...]
    checks: tuple[Check, ...] = ()
    notices: tuple[str, ...] = ()


@runtime_checkable
class Adapter(Protocol):
    """Knows where the attention modules of one model family are.

    Entry points are loaded when a model comes that no registered adapter serves: the module that
    defines an adapter may import that model's, and torch.
    """

    @property
    def mode(self) -> str:
        """What is swapped; ``"attention"`` is the one mode of this release."""

    @property
    def model_classes(self) -> tuple[str, ...]:
        """Qualified names of the exact model classes that it serves."""

    def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
        """Look at a model without changing it.

        Compilation, checkpoint wrappers, the flags of ``Site.checkpoint_flag_owner``, meta tensors
        and foreign saved-tensor hooks are checked on the returned sites by the registry.

        Args:
            model: One model, or one stage module when ``setup.pp_size`` is above 1, possibly
                inside ``torch.compile``'s or a checkpoint wrapper.
            setup: What the trainer told.

        Returns:
            The sites, with every check made.
        """
