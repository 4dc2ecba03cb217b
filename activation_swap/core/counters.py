# SPDX-License-Identifier: Apache-2.0
"""What an engine counts. Written under the engine's lock, read as a snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

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

    def anew(self) -> Counters:
        """Return counters that start now; what is resident stays so."""
        resident = self.resident_bytes
        return Counters(resident_bytes=resident, resident_bytes_peak=resident)

    def snapshot(self, **gauges: int) -> SwapStats:
        """Return the public, frozen form.

        Args:
            gauges: The fields of ``SwapStats`` that are not counted here.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= gauges
        values["kept_bytes"] = {k: v for k, v in sorted(self.kept_bytes.items()) if v}
        return SwapStats(**values)
