# SPDX-License-Identifier: Apache-2.0
"""How long compute waited for copies, and which part of them would hide behind it."""

from __future__ import annotations

from math import ceil
from statistics import median
from typing import Any, NamedTuple

__all__ = ["Overlap"]


class _Wait(NamedTuple):
    lane: str
    stream: Any
    before: Any
    after: Any


class Overlap:
    """What :meth:`~activation_swap.Swap.measure_overlap` has seen of the waits of compute.

    Every group that moves makes compute wait for its copies, out and back. The time from one such
    wait to the next is what copies can hide behind; the time in a wait is what was left of them.
    Both are the device's own, from events on the compute stream. Reading them waits for the device.
    """

    def __init__(self) -> None:
        self._waits: list[_Wait] = []

    def __repr__(self) -> str:
        return (
            f"Overlap(waits={self.waits}, waited_ms={self.waited_ms:.1f}, "
            f"fraction={self.fraction:.2f})"
        )

    def add(self, lane: str, *, stream: Any, before: Any, after: Any) -> None:
        """Take a wait in: the engine calls this.

        Args:
            lane: The transfer stream that was waited for.
            stream: The compute stream that waits.
            before: Timing event that ``stream`` reaches when it begins to wait.
            after: The same when it goes on.
        """
        self._waits.append(_Wait(lane, stream, before, after))

    @property
    def waits(self) -> int:
        """How many waits were seen; 0 on a CPU, and where nothing moved."""
        return len(self._waits)

    @property
    def waited_ms(self) -> float:
        """Milliseconds that compute waited for copies, of all of them together."""
        return sum(map(_length, list(self._waits)))

    @property
    def fraction(self) -> float:
        """The part of what moved whose copies would have hidden, rounded up to a hundredth.

        Of the median wait and the median time between two, in the direction that hides less: where
        a layer's copies take longer than its compute, that is compute over copies. 1 where compute
        hardly waits, and where nothing was seen. Times the ``SwapPolicy.fraction`` of the measured
        swap it is the one under which next to nothing is waited for; under a pipeline the next
        smaller 1/n, since a chunk has one group in flight.
        """
        # Medians: between passes, and between the chunks of a pipeline, is other work.
        medians = [(median(compute), median(waited)) for compute, waited in self._lanes()]
        shares = [compute / (compute + waited) for compute, waited in medians if waited > 0]
        return max(1, ceil(min(shares, default=1.0) * 100)) / 100

    def _lanes(self) -> list[tuple[list[float], list[float]]]:
        """Return milliseconds (between waits, in the later wait) by lane and stream."""
        found: dict[tuple[str, Any], tuple[list[float], list[float]]] = {}
        last: dict[tuple[str, Any], _Wait] = {}
        for wait in list(self._waits):
            key = wait.lane, wait.stream
            earlier, last[key] = last.get(key), wait
            if earlier is not None:
                waited = _length(wait)
                compute, waits = found.setdefault(key, ([], []))
                compute.append(earlier.after.elapsed_time(wait.before))
                waits.append(waited)
        return list(found.values())


def _length(wait: _Wait) -> float:
    wait.after.synchronize()
    milliseconds: float = wait.before.elapsed_time(wait.after)
    return milliseconds
