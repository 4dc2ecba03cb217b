"""A module whose saved tensors are swapped, and the checked intent to swap a set of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import ref

from activation_swap._config import SwapPolicy, TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["HookedSite", "Site", "SwapPlan", "spread"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One attention module that an adapter selected.

    Attributes:
        fqn: Fully qualified name of ``module`` in the model that was passed to ``apply``.
        module: The module whose forward saves the tensors.
        owners: The modules that call it, outermost first (model, inner model, decoder layer).
            Each is checked for a later ``.compile()`` before every training forward.
        checkpoint_flag_owner: The module whose ``gradient_checkpointing`` attribute says whether
            this site is recomputed in backward, or ``None`` where the model has no such flag.
        cache_arguments: Names under which ``module`` may be given a key-value cache. In training
            it holds saved tensors beyond the forward, and moving those frees nothing: a warning.
        stage: Position of its stage module among those that were passed to ``apply``.
        returns: Length of the tuple that ``module`` returns, or ``None`` when it does not matter.
    """

    fqn: str
    module: nn.Module
    owners: tuple[nn.Module, ...] = ()
    checkpoint_flag_owner: nn.Module | None = None
    cache_arguments: tuple[str, ...] = ()
    stage: int = 0
    returns: int | None = None


class HookedSite:
    """A site as its hooks know it: a module holds its hooks, and so they hold modules weakly.

    A swapped model dies with its last user, and does not wait for the garbage collector.

    Attributes:
        fqn: As in :class:`Site`; likewise ``cache_arguments``, ``stage`` and ``returns``.
        module: Weak reference to the module.
        called: Weak references to the owners and the module: ``.compile()`` of any is refused.
        checkpoint_flag_owner: Weak reference to it, or ``None`` where there is none.
    """

    __slots__ = (
        "cache_arguments",
        "called",
        "checkpoint_flag_owner",
        "fqn",
        "module",
        "returns",
        "stage",
    )

    def __init__(self, site: Site) -> None:
        owner = site.checkpoint_flag_owner
        self.fqn = site.fqn
        self.cache_arguments = site.cache_arguments
        self.stage = site.stage
        self.returns = site.returns
        self.module = ref(site.module)
        self.called = (*map(ref, site.owners), self.module)
        self.checkpoint_flag_owner = None if owner is None else ref(owner)


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
        """Return the positions of the sites whose saved tensors are taken."""
        return spread([site.stage for site in self.sites], self.policy.fraction)


def spread(stages: Sequence[int], fraction: float) -> frozenset[int]:
    """Select ``fraction`` of a rank's attentions, spread evenly.

    The last one of every stage is among them: its backward is the signal that the others' is
    coming.

    Args:
        stages: The stage of each attention, in the order of the forward.
        fraction: See :class:`~activation_swap.SwapPolicy`.

    Returns:
        Positions in ``stages``.
    """
    # Exact, so that 0.1 of 10 sites is one of them, and not none for want of a last digit.
    share = Fraction(fraction).limit_denominator(1000)
    last = {stage: index for index, stage in enumerate(stages)}
    return frozenset(last.values()) | {
        index for index in range(len(stages)) if (index + 1) * share // 1 > index * share // 1
    }
