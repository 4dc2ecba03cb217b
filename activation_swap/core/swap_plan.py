# SPDX-License-Identifier: Apache-2.0
"""The checked intent to swap a set of sites."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from activation_swap._config import SwapPolicy, TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from activation_swap._site import Site

__all__ = ["SwapPlan", "share_of", "spread"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapPlan:
    """Everything ``core`` needs to install a swap. Building one changes nothing.

    Attributes:
        sites: In the order of the forward. With several stage modules: stage after stage.
        setup: What the trainer told.
        policy: What moves.
    """

    sites: tuple[Site, ...]
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    policy: SwapPolicy = field(default_factory=SwapPolicy)

    def recorded(self) -> frozenset[int]:
        """Return the indices of the sites whose saved tensors are taken."""
        return spread([site.stage for site in self.sites], self.policy.fraction)


def share_of(fraction: float) -> Fraction:
    """Return a fraction exactly: 0.1 of 10 is 1 then, and not 0 for want of a last digit."""
    return Fraction(fraction).limit_denominator(1000)


def spread(stages: Sequence[int], fraction: float) -> frozenset[int]:
    """Select ``fraction`` of a rank's attentions, spread evenly over each stage.

    Counted back from the last one of the stage, which is always among them: its backward is the
    signal that the others' is coming.

    Args:
        stages: The stage of each attention, in the order of the forward.
        fraction: See :class:`~activation_swap.SwapPolicy`.

    Returns:
        Indices into ``stages``.
    """
    share = share_of(fraction)
    from_the_last: Counter[int] = Counter()
    selected = []
    for index in range(len(stages) - 1, -1, -1):
        steps = from_the_last[stages[index]]
        if steps == 0 or steps * share // 1 > (steps - 1) * share // 1:
            selected.append(index)
        from_the_last[stages[index]] += 1
    return frozenset(selected)
