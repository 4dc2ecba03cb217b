# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the training code, and not at a hook of this package."""

from __future__ import annotations

import inspect
import warnings

__all__ = ["warn"]

_BETWEEN = frozenset({"activation_swap", "torch", "transformers"})
"""Packages that are on the stack between a training loop and a hook."""


def warn(message: str) -> None:
    """Give a ``RuntimeWarning`` at the innermost line outside of the packages in between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _package(frame.f_globals) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__")).partition(".")[0]
