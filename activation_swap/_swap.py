# SPDX-License-Identifier: Apache-2.0
"""The handle that ``registry.apply`` returns."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self

from activation_swap._overlap import Overlap
from activation_swap._stats import SwapStats
from activation_swap._verbs import GroupVerbs, IdleVerbs

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Installation", "Swap"]


class Installation(Protocol):
    """What the core installed on a model; the live part behind a :class:`Swap`."""

    @property
    def active(self) -> bool:
        """Whether the hooks are on the model."""

    @property
    def groups(self) -> GroupVerbs:
        """The verbs of a pipeline scheduler, for chunks keyed by (stage, microbatch)."""

    @property
    def overlaps(self) -> list[Overlap]:
        """What takes the waits of compute in, while somebody measures."""

    def describe(self) -> str:
        """What ``repr`` says of it."""

    def stats(self) -> SwapStats:
        """Counters since the last reset."""

    def reset_stats(self) -> None:
        """Start the counters anew."""

    def attach(self, schedule: Any) -> None:
        """Follow a ``torch.distributed.pipelining`` schedule."""

    def remove(self) -> None:
        """Take everything off the model."""


class Swap:
    """A live (or, for mode ``none``, empty) activation swap on one model.

    State belongs to this object, never to the process: two models have two swaps. As a context, it
    is removed at the end of a ``with`` block.
    """

    __slots__ = ("__weakref__", "_installation")

    def __init__(self, installation: Installation | None = None) -> None:
        self._installation = installation

    def __repr__(self) -> str:
        if self._installation is None or not self._installation.active:
            return "Swap(active=False)"
        return f"Swap(active=True, {self._installation.describe()})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def active(self) -> bool:
        """Whether the model's attention is being swapped."""
        return self._installation is not None and self._installation.active

    def stats(self) -> SwapStats:
        """Return the counters since :meth:`reset_stats`; all zero for mode ``none``."""
        return SwapStats() if self._installation is None else self._installation.stats()

    def reset_stats(self) -> None:
        """Start the counters anew."""
        if self._installation is not None:
            self._installation.reset_stats()

    @contextmanager
    def measure_overlap(self) -> Iterator[Overlap]:
        """Measure, during a ``with`` block of training steps, how far copies hide behind compute.

        It costs four events per group that moves, changes nothing, and needs no synchronisation
        until the result is read. Steps that warm up belong before it::

            with swap.measure_overlap() as overlap:
                for _ in range(3):
                    train_step()
            if overlap.fraction < 1:
                swap.remove()
                policy = SwapPolicy(fraction=overlap.fraction)
                swap = registry.apply("attention", model, policy=policy)

        On an inactive swap nothing is seen.

        Yields:
            What was seen so far; it may be read after the block, too.
        """
        overlap = Overlap()
        installation = self._installation
        if installation is None:
            yield overlap
            return
        installation.overlaps.append(overlap)
        try:
            yield overlap
        finally:
            installation.overlaps.remove(overlap)

    def attach(self, schedule: Any) -> None:
        """Follow a ``torch.distributed.pipelining`` schedule, under ``pp_size > 1``.

        The schedule is read, never changed. A swap follows one schedule at a time: the last that
        was attached. Nothing happens on an inactive swap: mode ``none``, a rank whose stages hold
        no attention, after :meth:`remove`.

        Args:
            schedule: The schedule over the stages whose modules were passed to ``apply``.

        Raises:
            RejectedError: It is no such schedule, or pp_size is 1.
            SwapStateError: One of its stages follows another swap.
        """
        if self._installation is not None and self._installation.active:
            self._installation.attach(schedule)

    @property
    def groups(self) -> GroupVerbs:
        """The verbs for a pipeline scheduler of one's own, keyed by ``(stage, microbatch)``.

        On an inactive swap they do nothing, so that a scheduler needs no case for it.

        Raises:
            RejectedError: pp_size is 1.
        """
        if self._installation is None or not self._installation.active:
            return IdleVerbs()
        return self._installation.groups

    def remove(self) -> None:
        """Take the swap off the model. Graphs that are still alive stay right. Repeatable."""
        if self._installation is not None:
            self._installation.remove()
