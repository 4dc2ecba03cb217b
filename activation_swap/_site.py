# SPDX-License-Identifier: Apache-2.0
"""Where the saved tensors are taken: what an adapter tells of one attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Site"]


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
