# SPDX-License-Identifier: Apache-2.0
"""How long compute waited for copies, and which part of them would hide behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["Overlap"]


class _Wait(NamedTuple):
    lane: str
    stream: Any
    before: Any
    after: Any


class Overlap:
    """What :meth:`~activation_swap.Swap.measure_overlap` has seen of the waits of compute.

    Every attention makes compute wait for the copies of another one. The time from one such wait
    to the next is what copies can hide behind; the time in a wait is what was left of them. Both
    are the device's own, from events on the compute stream. Reading them waits for the device.
    """

    def __init__(self) -> None:
        self._waits: list[_Wait] = []

    def __repr__(self) -> str:
        return (
            f"Overlap(compute_ms={self.compute_ms:.1f}, waited_ms={self.waited_ms:.1f}, "
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
    def compute_ms(self) -> float:
        """Milliseconds from wait to wait, forward and backward together; 0 on a CPU."""
        return sum(compute for compute, _ in self._lanes().values())

    @property
    def waited_ms(self) -> float:
        """Milliseconds that compute waited for copies, likewise."""
        return sum(waited for _, waited in self._lanes().values())

    @property
    def fraction(self) -> float:
        """The part of what moved whose copies would have hidden: 1 where compute never waited.

        In the direction that hides less. Times the ``SwapPolicy.fraction`` of the measured swap
        it is the one that costs no waiting. Copies follow each other on the link, so that
        waiting falls by as much as the copies take less time, until none is left.
        """
        shares = [
            compute / (compute + waited)
            for compute, waited in self._lanes().values()
            if compute + waited > 0
        ]
        return min(shares, default=1.0)

    def _lanes(self) -> dict[str, tuple[float, float]]:
        """Return (compute, waited) in milliseconds by lane."""
        found: dict[str, tuple[float, float]] = {}
        for earlier, wait in pairwise(self._waits):
            # From forward to backward and back there is other work than that of layers.
            if earlier.lane != wait.lane or earlier.stream != wait.stream:
                continue
            wait.after.synchronize()
            compute, waited = found.get(wait.lane, (0.0, 0.0))
            compute += earlier.after.elapsed_time(wait.before)
            waited += wait.before.elapsed_time(wait.after)
            found[wait.lane] = (compute, waited)
        return found
