# SPDX-License-Identifier: Apache-2.0
"""What a mode puts on a model and around its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks import peers
from benchmarks.peers import Applied, NotRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["MODES", "Applied", "NotRunError", "apply"]


def apply(mode: str, model: Any, policy: Mapping[str, Any]) -> Applied:
    """Put ``mode`` on ``model``.

    Args:
        mode: A key of :data:`MODES`.
        model: On its device.
        policy: Fields of ``SwapPolicy``; peers have no such thing and ignore it.

    Raises:
        NotRunError: The mode cannot run here, and why.
    """
    return MODES[mode](model, policy)


def _none(_model: Any, _policy: Mapping[str, Any]) -> Applied:
    return Applied()


def _attention(model: Any, policy: Mapping[str, Any]) -> Applied:
    from activation_swap import SwapPolicy, registry  # noqa: PLC0415 - `none` imports nothing of it

    swap = registry.apply("attention", model, policy=SwapPolicy(**policy))
    return Applied(remove=swap.remove, stats=swap.stats, reset_stats=swap.reset_stats)


def _no_copies(model: Any, policy: Mapping[str, Any]) -> Applied:
    """Do all of the swap's work but the copies: what is left is the cost of the Python path."""
    from activation_swap import SwapPolicy, registry  # noqa: PLC0415
    from activation_swap.core.install import install  # noqa: PLC0415
    from activation_swap.core.link import Links, transfer_for  # noqa: PLC0415
    from activation_swap.core.swap_plan import SwapPlan  # noqa: PLC0415

    def make_transfer(device: torch.device) -> Any:
        return _WithoutCopies(transfer_for(device))

    explanation = registry.explain(model)
    explanation.raise_first()
    plan = SwapPlan(sites=explanation.sites, policy=SwapPolicy(**policy))
    installed = install(plan, links=Links(plan.policy, make_transfer=make_transfer))
    return Applied(
        remove=installed.remove,
        stats=installed.stats,
        reset_stats=installed.reset_stats,
        about="all of the swap's work but the copies; its gradients are garbage and not applied",
    )


class _WithoutCopies:
    """A transfer that orders streams as ever and moves nothing. Reloaded data is garbage."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def offload(self, moves: Any, **arguments: Any) -> Any:
        return self._transfer.offload(moves[:0], **arguments)

    def reload(self, moves: Any, **arguments: Any) -> Any:
        return self._transfer.reload(moves[:0], **arguments)


MODES: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], Applied]]] = {
    "none": _none,
    "attention": _attention,
    "no_copies": _no_copies,
    **peers.PEERS,
}
"""Every mode by its name."""
