# SPDX-License-Identifier: Apache-2.0
"""One profiled step as lanes: when compute, D2H and H2D were busy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lanes import lanes_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["profile_step"]


def profile_step(step: Callable[[], None]) -> dict[str, Any]:
    """Profile one step.

    Returns:
        As :func:`benchmarks.lanes.lanes_of`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return lanes_of(trace["traceEvents"])
