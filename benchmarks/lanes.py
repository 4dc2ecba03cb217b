# SPDX-License-Identifier: Apache-2.0
"""What a profiled step is drawn as: busy spans by lane."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LANES", "lanes_of"]

LANES: Final = ("compute", "D2H", "H2D")
_GAP_US: Final = 5.0
"""Shorter gaps are not drawn: a step has thousands of kernels."""


def lanes_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what a trace in Chrome's format shows.

    Returns:
        ``lanes``: busy spans by lane, as [start, length] in microseconds from the first one;
        ``ranges``: number of ``activation_swap::`` ranges by verb.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    on_device = [event for event in complete if event.get("cat") in {"kernel", "gpu_memcpy"}]
    lane_of = _lanes_of_streams(on_device)
    first = min((event["ts"] for event in on_device), default=0.0)
    spans: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for event in on_device:
        spans[lane_of[_stream(event)]].append((event["ts"] - first, event["dur"]))
    verbs = (event["name"].partition("(")[0] for event in complete if _is_range(event))
    return {
        "lanes": {lane: _merged(known) for lane, known in spans.items()},
        "ranges": dict(Counter(verbs)),
    }


def _lanes_of_streams(events: Iterable[dict[str, Any]]) -> dict[Any, str]:
    """Tell the streams apart: kernels may run on the streams of copies, as those of peers do."""
    streams: dict[Any, Counter[str]] = {}
    for event in events:
        kind = "compute" if event["cat"] == "kernel" else _direction(event)
        streams.setdefault(_stream(event), Counter())[kind] += 1
    busiest = max(streams, key=lambda stream: streams[stream]["compute"], default=None)
    lanes = {}
    for stream, kinds in streams.items():
        copies = {kind: number for kind, number in kinds.items() if kind != "compute"}
        own = stream == busiest or not copies
        lanes[stream] = "compute" if own else max(copies, key=lambda kind: copies[kind])
    return lanes


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def _direction(event: dict[str, Any]) -> str:
    name = event["name"]
    return "D2H" if "DtoH" in name else "H2D" if "HtoD" in name else "compute"


def _is_range(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith("activation_swap::")


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, length in sorted(spans):
        end = start + length
        if merged and start - sum(merged[-1]) < _GAP_US:
            merged[-1] = (merged[-1][0], max(sum(merged[-1]), end) - merged[-1][0])
        else:
            merged.append((start, end - start))
    return [(round(start, 1), round(length, 1)) for start, length in merged]
