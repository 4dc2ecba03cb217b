"""One profiled step as lanes: when compute, D2H and H2D were busy."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LANES", "lanes_of", "profile_step"]

LANES: Final = ("compute", "D2H", "H2D")
_GAP_US: Final = 5.0
"""Shorter gaps are not drawn: a step has thousands of kernels."""


def profile_step(step: Callable[[], None]) -> dict[str, Any]:
    """Profile one step.

    Returns:
        ``lanes``: busy spans by lane, as [start, length] in microseconds from the first one;
        ``ranges``: number of ``activation_swap::`` ranges by verb.
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


def lanes_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the lanes and ranges of the events of a trace in Chrome's format."""
    spans: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    ranges: Counter[str] = Counter()
    for event in events:
        if event.get("ph") != "X":
            continue
        lane = _lane(event)
        if lane is not None:
            spans[lane].append((float(event["ts"]), float(event["dur"])))
        if event.get("cat") == "user_annotation":
            verb, parenthesis, _ = event["name"].partition("(")
            if parenthesis and verb.startswith("activation_swap::"):
                ranges[verb] += 1
    first = min((start for lane in spans.values() for start, _ in lane), default=0.0)
    return {
        "lanes": {lane: _merged(known, first) for lane, known in spans.items()},
        "ranges": dict(ranges),
    }


def _lane(event: dict[str, Any]) -> str | None:
    category, name = event.get("cat"), event.get("name", "")
    if category == "kernel":
        return "compute"
    if category == "gpu_memcpy" and "DtoH" in name:
        return "D2H"
    if category == "gpu_memcpy" and "HtoD" in name:
        return "H2D"
    return None


def _merged(spans: list[tuple[float, float]], first: float) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, length in sorted(spans):
        begin, end = start - first, start - first + length
        if merged and begin - sum(merged[-1]) < _GAP_US:
            merged[-1] = (merged[-1][0], max(sum(merged[-1]), end) - merged[-1][0])
        else:
            merged.append((begin, end - begin))
    return [(round(start, 1), round(length, 1)) for start, length in merged]
