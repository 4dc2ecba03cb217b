# SPDX-License-Identifier: Apache-2.0
"""Move what attention saves for backward to pinned host memory and back, bit for bit."""

from __future__ import annotations

from activation_swap import errors
from activation_swap._config import SwapPolicy, TrainingSetup
from activation_swap._explanation import Explanation
from activation_swap._overlap import Overlap
from activation_swap._registry import Registry, registry
from activation_swap._request import Mode
from activation_swap._stats import KeepReason, SwapStats
from activation_swap._swap import Swap
from activation_swap.errors import ActivationSwapError

__all__ = [
    "ActivationSwapError",
    "Explanation",
    "KeepReason",
    "Mode",
    "Overlap",
    "Registry",
    "Swap",
    "SwapPolicy",
    "SwapStats",
    "TrainingSetup",
    "errors",
    "registry",
]

__version__ = "0.1.0"
