# SPDX-License-Identifier: Apache-2.0
"""The two optimizers: AdamW after backward, SGD inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import nn

    from activation_swap.trainer.config import AdamWSection, SGDSection

__all__ = ["AdamW", "GradientObserver", "Optimizer", "SGDInBackward", "build_optimizer"]

GradientObserver = Callable[[str, torch.Tensor], None]
"""Called with the name of a parameter and its complete gradient, before the update."""


class Optimizer(Protocol):
    """What the loop needs of an optimizer.

    Attributes:
        observer: Sees every gradient of a step once, or ``None``.
    """

    observer: GradientObserver | None

    def step(self) -> None:
        """Finish the update of a step, after its last backward. No gradient is left."""

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` takes: tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint."""


class AdamW:
    """``torch.optim.AdamW`` with an eye on the gradients."""

    def __init__(self, model: nn.Module, section: AdamWSection) -> None:
        self.observer: GradientObserver | None = None
        self._parameters = dict(model.named_parameters())
        self._inner = torch.optim.AdamW(
            self._parameters.values(),
            lr=section.lr,
            betas=section.betas,
            weight_decay=section.weight_decay,
        )

    def step(self) -> None:
        """Update every weight and free the gradients."""
        if self.observer is not None:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self.observer(name, parameter.grad)
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and step counts."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the moments and step counts."""
        self._inner.load_state_dict(state)


class SGDInBackward:
    """Plain SGD, applied to each weight as soon as its gradient is complete.

    Never more than a few gradients exist at once, so that a model whose weights fill half the
    device can be trained on it. One backward is one update.
    """

    def __init__(self, model: nn.Module, section: SGDSection) -> None:
        self.observer: GradientObserver | None = None
        self._lr = section.lr
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # pragma: no cover - torch calls this hook with a gradient only
            return
        if self.observer is not None:
            self.observer(self._names[parameter], gradient)
        parameter.add_(gradient, alpha=-self._lr)
        parameter.grad = None

    def step(self) -> None:
        """Do nothing: backward has updated every weight."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: plain SGD has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: plain SGD has no state."""


def build_optimizer(model: nn.Module, section: AdamWSection | SGDSection) -> Optimizer:
    """Return the optimizer that ``section`` asks for, on all weights of ``model``."""
    if section.name == "adamw":
        return AdamW(model, section)
    return SGDInBackward(model, section)
