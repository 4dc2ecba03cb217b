"""What an engine counts. Written under the engine's lock, read as a snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from activation_swap._stats import SwapStats

if TYPE_CHECKING:
    from activation_swap._stats import KeepReason

__all__ = ["Counters"]


@dataclass(kw_only=True, slots=True)
class Counters:
    """Sums since the last reset, and the running number of resident bytes."""

    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    offloaded_storages: int = 0
    saved_bytes: int = 0
    reload_misses: int = 0
    late_releases: int = 0
    resident_bytes: int = 0
    resident_bytes_peak: int = 0
    kept_bytes: Counter[KeepReason] = field(default_factory=Counter)

    def gain(self, nbytes: int) -> None:
        """Count device bytes that the swap keeps alive from now on."""
        self.resident_bytes += nbytes
        self.resident_bytes_peak = max(self.resident_bytes_peak, self.resident_bytes)

    def lose(self, nbytes: int) -> None:
        """Count device bytes that it no longer keeps alive."""
        self.resident_bytes -= nbytes

    def reset(self) -> None:
        """Start anew; what is resident stays so."""
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.offloaded_storages = 0
        self.saved_bytes = 0
        self.reload_misses = 0
        self.late_releases = 0
        self.resident_bytes_peak = self.resident_bytes
        self.kept_bytes = Counter()

    def snapshot(
        self, *, live_groups: int, host_bytes_in_use: int, host_bytes_reserved: int
    ) -> SwapStats:
        """Return the public, frozen form."""
        return SwapStats(
            offloaded_bytes=self.offloaded_bytes,
            reloaded_bytes=self.reloaded_bytes,
            offloaded_storages=self.offloaded_storages,
            saved_bytes=self.saved_bytes,
            reload_misses=self.reload_misses,
            late_releases=self.late_releases,
            live_groups=live_groups,
            host_bytes_in_use=host_bytes_in_use,
            host_bytes_reserved=host_bytes_reserved,
            resident_bytes=self.resident_bytes,
            resident_bytes_peak=self.resident_bytes_peak,
            kept_bytes={k: v for k, v in sorted(self.kept_bytes.items()) if v},
        )
