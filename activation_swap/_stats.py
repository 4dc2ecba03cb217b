# SPDX-License-Identifier: Apache-2.0
"""Counters that a user reads: host-side, no device synchronisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KeepReason", "SwapStats"]


class KeepReason(StrEnum):
    """Why a saved tensor stayed on the device."""

    SMALL = "small"
    """Below ``SwapPolicy.min_bytes``."""
    PARAMETER = "parameter"
    """A parameter or buffer, a view of one, or autocast's cached cast of one."""
    ARGUMENT = "argument"
    """An argument of the attention without gradient: cos, sin, mask. Its owner is outside."""
    OTHER_DEVICE = "other_device"
    """Not on the device of the attention."""
    UNSUPPORTED = "unsupported"
    """Not a dense strided tensor of whole bytes (sparse, nested, quantized, complex, negated, of
    few bits, without memory), or a subclass that cannot be taken apart."""
    PARTIAL_VIEW = "partial_view"
    """A view of a small part of a larger storage that belongs to somebody else."""
    CHANGED = "changed"
    """Changed in place after it was saved, or resized: its copy could be of either value."""
    LAST = "last"
    """The last attention of the chain: its backward comes first."""
    SCHEDULE = "schedule"
    """The pipeline plan leaves this group on the device."""
    FAILED = "failed"
    """The attention raised: what its graph may still need stays where it is."""
    HOST_MEMORY = "host_memory"
    """Pinned host memory could not be had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapStats:
    """Counters since ``Swap.reset_stats()`` and gauges of this moment. All sizes in bytes.

    Attributes:
        offloaded_bytes: What crossed the link from device to host.
        reloaded_bytes: What crossed the link from host to device.
        offloaded_storages: Number of storages copied to the host.
        saved_bytes: Device bytes given up after their copy.
        reload_misses: Groups whose reload no prefetch had launched when backward needed them.
        late_releases: Groups whose backward began before their device memory was given up.
        live_groups: Groups with at least one live saved tensor now.
        host_bytes_in_use: Host bytes that hold saved tensors now.
        host_bytes_reserved: Host bytes that the pinned pool has reserved now.
        resident_bytes: Device bytes of eligible saved tensors that the swap keeps alive now.
        resident_bytes_peak: Largest ``resident_bytes`` since the reset.
        kept_bytes: Device bytes of saved tensors left on the device, by reason. Each storage is
            counted once per attention call.
    """

    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    offloaded_storages: int = 0
    saved_bytes: int = 0
    reload_misses: int = 0
    late_releases: int = 0
    live_groups: int = 0
    host_bytes_in_use: int = 0
    host_bytes_reserved: int = 0
    resident_bytes: int = 0
    resident_bytes_peak: int = 0
    kept_bytes: Mapping[KeepReason, int] = field(default_factory=dict)
