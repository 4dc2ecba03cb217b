# SPDX-License-Identifier: Apache-2.0
"""The reference trainer: a YAML file with one key, ``activation_swap``, and the commands.

:class:`ActivationSwapCallback` brings the swap to Hugging Face's ``Trainer`` instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from activation_swap.trainer.callback import ActivationSwapCallback

__all__ = ["ActivationSwapCallback"]


def __getattr__(name: str) -> Any:
    # Late: the callback needs transformers' trainer, and the commands do not.
    if name == "ActivationSwapCallback":
        from activation_swap.trainer.callback import ActivationSwapCallback  # noqa: PLC0415

        return ActivationSwapCallback
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
