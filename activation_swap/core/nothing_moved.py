# SPDX-License-Identifier: Apache-2.0
"""The warning of a training forward that moved nothing, and why it did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from activation_swap._stats import KeepReason
from activation_swap.core.warning import warn

if TYPE_CHECKING:
    from activation_swap.core.engine import Engine

__all__ = ["NothingMoved"]


class NothingMoved:
    """Warns at most once in the life of a swap; each order of groups knows when to.

    Args:
        engine: Knows what was kept, and why.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._warned = False

    def warn(self) -> None:
        """Warn of a forward in which something should have moved, and nothing did."""
        if self._warned:
            return
        kept_bytes = self._engine.stats().kept_bytes
        if not kept_bytes:
            # Nothing is trainable.
            return
        self._warned = True
        if KeepReason.HOST_MEMORY in kept_bytes:
            # It has a warning of its own. Not asked again: counting takes longer the more is kept.
            return
        kept = ", ".join(f"{reason.value}: {nbytes}" for reason, nbytes in kept_bytes.items())
        warn(
            "activation_swap: attention moved nothing in a training forward; bytes kept on the "
            f"device by reason: {kept}. "
            "See SwapPolicy, or set activation_swap: none.",
        )
