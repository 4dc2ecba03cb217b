# SPDX-License-Identifier: Apache-2.0
"""What must hold at every training forward of a swapped attention, whatever came after apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from activation_swap.core.recorder import Recorder
from activation_swap.core.torch_private import (
    compiled_call,
    in_backward,
    is_replica,
    pop_saved_tensor_hooks,
    top_saved_tensor_hooks,
    under_dynamo,
)
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from activation_swap.core.hooked_site import HookedSite
    from activation_swap.core.transfer import Transfer
    from activation_swap.errors import ActivationSwapError

__all__ = [
    "arity_error",
    "check_call",
    "check_recompute_flag",
    "check_result",
    "other_hooks",
    "shallow_copy_error",
]


def check_recompute_flag(site: HookedSite) -> None:
    """Refuse a forward whose layer is set to be recomputed in backward.

    Checked with and without grad: re-entrant checkpointing runs the first forward without.

    Raises:
        RejectedError: Gradient checkpointing is on for this attention.
    """
    known = site.checkpoint_flag_owner
    owner = None if known is None else known()
    if owner is not None and getattr(owner, "gradient_checkpointing", False) and owner.training:
        raise _checkpointing(site, "its layer's gradient_checkpointing flag is set")


def check_call(site: HookedSite, transfer: Transfer) -> None:
    """Refuse a training forward that swapping would make slow, empty or wrong without a word.

    Raises:
        RejectedError: The attention is recomputed, compiled, captured, or inside of other
            saved-tensor hooks.
    """
    if in_backward():
        raise _checkpointing(
            site, "the forward runs inside of a backward: recomputed, or called by a hook"
        )
    hooks = other_hooks()
    if hooks is not None:
        if str(getattr(hooks[0], "__module__", None)).startswith("torch.utils.checkpoint"):
            raise _checkpointing(site, "the forward runs inside of torch.utils.checkpoint")
        raise Reason.OUTER_HOOKS.error(where=site.fqn, found=f"{hooks[0]!r}")
    called = [module for known in site.called if (module := known()) is not None]
    if under_dynamo() or compiled_call(*called):
        raise Reason.COMPILED_LATER.error(where=site.fqn, found="torch.compile")
    if transfer.capturing():
        raise Reason.GRAPH_CAPTURE.error(where=site.fqn, found="a stream under graph capture")


def other_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost saved-tensor hooks of this thread that are not of a swap.

    Those of a swap are left over from an attention that was interrupted, or that has put others on
    without taking them off, and are taken off here.
    """
    while (hooks := top_saved_tensor_hooks()) is not None:
        recorder = getattr(hooks[0], "__self__", None)
        if not isinstance(recorder, Recorder):
            return hooks
        recorder.close_interrupted()
        if top_saved_tensor_hooks() == hooks:
            pop_saved_tensor_hooks()
    return None


def shallow_copy_error(site: HookedSite, module: Any) -> ActivationSwapError:
    """Return the refusal of a call of another module that has the hooks of the site's.

    DataParallel makes such copies, one per device, whose weights are no parameters.
    """
    found = "a replica of DataParallel" if is_replica(module) else "a copy of the module"
    return Reason.SHALLOW_COPY.error(where=site.fqn, found=found)


def _checkpointing(site: HookedSite, found: str) -> ActivationSwapError:
    return Reason.CHECKPOINTING_ENABLED_LATER.error(where=site.fqn, found=found)


def check_result(site: HookedSite, result: Any) -> None:
    """Refuse what an attention returned when it is not what its release is known to return.

    Raises:
        RejectedError: Something else than a tuple of ``site.returns`` items.
    """
    error = arity_error(site.fqn, result, expected=site.returns)
    if error is not None:
        raise error


def arity_error(fqn: str, result: Any, *, expected: int | None) -> ActivationSwapError | None:
    """Return the refusal of a result of another length than ``expected``, or ``None``."""
    if expected is None or (isinstance(result, tuple) and len(result) == expected):
        return None
    kind = type(result).__name__
    return Reason.RETURN_ARITY.error(
        where=fqn,
        found=f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {kind}",
        expected=f"a tuple of {expected}",
    )
