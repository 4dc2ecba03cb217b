# SPDX-License-Identifier: Apache-2.0
"""The order without pipeline parallelism: layer by layer, a window of groups behind."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING
from weakref import ref

from activation_swap._stats import KeepReason
from activation_swap.core.group import GroupState
from activation_swap.core.nothing_moved import NothingMoved
from activation_swap.core.swap_plan import share_of

if TYPE_CHECKING:
    from activation_swap.core.engine import Engine
    from activation_swap.core.group import Group

__all__ = ["LayerChain", "window_of"]


def window_of(fraction: float) -> int:
    """Return how many groups may still be copied when the next attention that moves ends.

    One where every n-th attention moves: two or three make no step faster (measured on an H200 at
    7,168 tokens), and each costs the memory of a group during the forward.

    Two where gaps of n and n + 1 layers alternate, as for a fraction of 0.7: with one, a copy must
    fit into the shorter gap; with two, two of them into both. With copies as long as the gaps are
    on average, that is enough: any m + 1 gaps of an even spread take the time of m copies at least.

    Args:
        fraction: See :class:`~activation_swap.SwapPolicy`.
    """
    return 1 if share_of(fraction).numerator == 1 else 2


class _Position(threading.local):
    """Where this thread's forward is. The group is known weakly: a dropped graph is gone."""

    def __init__(self) -> None:
        self.group: ref[Group] | None = None
        # No index is higher: whichever attention comes first begins a chain.
        self.index = sys.maxsize
        self.began = 0
        self.offloading: deque[ref[Group]] = deque()


class LayerChain:
    """Offloads each attention's group at its end, and releases the one a window before.

    With a window of one, releasing a group when the next one ends gives the copy the time of one
    gap to finish beside compute, and bounds the forward's device memory to two groups; with two, it
    is the time of two gaps, and three groups. The last group of the model stays: its backward is
    next.

    Args:
        engine: What moves the groups.
        first: Index of the first attention that is recorded.
        last: Index of the last attention.
        keep_last: Whether its group stays on the device.
        window: See :func:`window_of`.
    """

    def __init__(
        self, engine: Engine, *, first: int, last: int, keep_last: bool, window: int = 1
    ) -> None:
        self._engine = engine
        self._first = first
        self._last = last
        self._keep_last = keep_last
        self._window = window
        self._position = _Position()
        self._nothing_moved = NothingMoved(engine)
        self._moved = False

    def admit(self, index: int) -> bool:
        """Continue this thread's chain, or begin one when the layers start again."""
        position = self._position
        if index <= position.index:
            # What a forward that ended early has left behind.
            self._release(position.offloading, keep=0)
            position.group = None
            position.began = index
        position.index = index
        return True

    def previous(self) -> Group | None:
        """Return the group of the layer before, if its graph is alive."""
        known = self._position.group
        return None if known is None else known()

    def keep(self, group: Group) -> KeepReason | None:
        """Keep the last group of the chain."""
        return KeepReason.LAST if self._keep_last and group.index == self._last else None

    def sealed(self, group: Group) -> None:
        """Release the group that is a window before this one, behind its copy."""
        position = self._position
        last = group.index == self._last
        # The peak of a step comes after the last attention: by then everything is released.
        self._release(position.offloading, keep=0 if last else self._window - 1)
        if group.storages:
            # A group without any is gone at once: the next one continues from the one before.
            position.group = ref(group)
        if group.state is GroupState.OFFLOADING:
            self._moved = True
            position.offloading.append(ref(group))
        # Once something did move, a forward in which nothing does is a short one. One that began in
        # the middle, where a hook has applied the swap, is short, too.
        if last and not self._moved and position.began <= self._first:
            self._nothing_moved.warn()

    def _release(self, offloading: deque[ref[Group]], *, keep: int) -> None:
        while len(offloading) > keep:
            group = offloading.popleft()()
            if group is not None:
                self._engine.release(group)
