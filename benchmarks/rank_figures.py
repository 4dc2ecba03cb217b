# SPDX-License-Identifier: Apache-2.0
"""The figures of one rank, and those of a measurement made from them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from activation_swap import Swap
    from activation_swap.trainer.pipeline_plan import RankPlan

__all__ = ["combine", "planned_figures", "reserved_bytes", "swap_figures"]

_SUMS = (
    *("saved_bytes", "offloaded_bytes", "reloaded_bytes", "host_bytes_reserved"),
    *("reload_misses", "late_releases"),
)


def combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the figures of a measurement: of the slowest rank, of the fullest, and sums."""
    times = [max(own) for own in zip(*(rank["step_ms_all"] for rank in ranks), strict=True)]
    peaks = [rank["peak_bytes"] for rank in ranks if rank["peak_bytes"] is not None]
    return {
        "step_ms": statistics.median(times),
        "step_ms_min": min(times),
        "step_ms_max": max(times),
        "step_ms_all": times,
        "peak_bytes": max(peaks, default=None),
        "losses": [loss for rank in ranks for loss in rank["losses"]],
        "gradient_digest": " ".join(rank["gradient_digest"] for rank in ranks),
        **{name: sum(rank[name] for rank in ranks) for name in _SUMS},
        "ranks": ranks,
    }


def reserved_bytes(device: torch.device) -> int | None:
    """Return the peak of what the allocator reserved, ``None`` on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_reserved()


def swap_figures(swap: Swap, steps: int) -> dict[str, Any]:
    """Return the swap's counters; what adds up is per step."""
    stats = swap.stats()
    return {
        "saved_bytes": stats.saved_bytes // steps,
        "offloaded_bytes": stats.offloaded_bytes // steps,
        "reloaded_bytes": stats.reloaded_bytes // steps,
        "offloaded_storages": stats.offloaded_storages // steps,
        "reload_misses": stats.reload_misses,
        "late_releases": stats.late_releases,
        "resident_bytes_peak": stats.resident_bytes_peak,
        "host_bytes_reserved": stats.host_bytes_reserved,
        "kept_bytes": {
            reason.value: nbytes // steps for reason, nbytes in stats.kept_bytes.items()
        },
    }


def planned_figures(planned: RankPlan) -> dict[str, Any]:
    """Return what the plan says of a rank: bytes, chunks, attention groups."""
    return {
        "saved_bytes_at_peak": planned.saved_bytes_at_peak,
        "offloaded_bytes": planned.offloaded_bytes_per_step,
        "moved_chunks": planned.moved_chunks,
        "moved_but_tail_chunks": planned.moved_but_tail_chunks,
        "kept_chunks": planned.kept_chunks,
        "chunks_in_flight_peak": planned.chunks_in_flight_peak,
        "resident_groups_peak_none": planned.resident_groups_peak_none,
        "resident_groups_peak": planned.resident_groups_peak,
    }
