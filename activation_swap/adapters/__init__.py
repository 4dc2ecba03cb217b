# SPDX-License-Identifier: Apache-2.0
"""Where the attention of each model family is: the built-in adapters and what makes one."""

from __future__ import annotations

from typing import Final

from activation_swap._check import Check, compare
from activation_swap._site import Site
from activation_swap.adapters.adapter import Adapter, Inspection
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention

__all__ = ["BUILT_IN", "Adapter", "Check", "Inspection", "Site", "compare"]

BUILT_IN: Final[tuple[Adapter, ...]] = (Qwen3MoeAttention(),)
"""What this release registers. Importing it imports neither torch nor transformers."""
