# SPDX-License-Identifier: Apache-2.0
"""What the caller of ``apply`` asked for, checked before any model is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from activation_swap._check import Check, compare
from activation_swap._config import SwapPolicy, TrainingSetup
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Mode", "check_policy", "check_setup"]

_LEGAL: Final = "legal"
_WITHOUT_ATTENTION: Final = ("off", "mlp")
"""Modes of activation checkpointing that recompute no attention."""


Mode = Literal["none", "attention"]
"""The values of the trainer's key ``activation_swap``."""


def check_setup(setup: object) -> tuple[Check, ...]:
    """Check what the trainer told.

    Args:
        setup: Should be a :class:`TrainingSetup`.

    Returns:
        Its fields first; then, when they are legal, what they ask for.
    """
    fields = compare(
        Reason.INVALID_SETUP,
        "training set-up",
        expected=_LEGAL,
        found=_judge(setup, TrainingSetup, _SETUP_RULES),
    )
    if not isinstance(setup, TrainingSetup) or not fields.passed:
        return (fields,)
    checkpoint = setup.activation_checkpoint
    return (
        fields,
        compare(
            Reason.OTHER_BACKEND,
            "back end",
            expected="pytorch",
            found={"TrainingSetup.backend": setup.backend},
        ),
        compare(
            Reason.COMPILE_REQUESTED,
            "torch.compile of the trainer",
            expected="False",
            found={"TrainingSetup.compile": str(setup.compile)},
        ),
        compare(
            Reason.CHECKPOINT_REQUESTED,
            "activation checkpointing of the trainer",
            expected=checkpoint if checkpoint in _WITHOUT_ATTENTION else "off",
            found={"TrainingSetup.activation_checkpoint": checkpoint},
        ),
    )


def check_policy(policy: object) -> Check:
    """Check the fields of a policy.

    Args:
        policy: Should be a :class:`SwapPolicy`.
    """
    found = _judge(policy, SwapPolicy, _POLICY_RULES)
    if isinstance(policy, SwapPolicy) and set(found.values()) == {_LEGAL}:
        ceiling, slab = policy.max_host_bytes, policy.slab_bytes
        if ceiling and ceiling < slab:
            # Not one slab fits, and nothing would ever move.
            found["SwapPolicy.max_host_bytes"] = f"{ceiling}, which is below slab_bytes, {slab}"
    return compare(Reason.INVALID_POLICY, "swap policy", expected=_LEGAL, found=found)


def _judge(
    value: object, cls: type, rules: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> dict[str, str]:
    if not isinstance(value, cls):
        return {cls.__name__: f"{value!r} of type {type(value).__name__}"}
    return {
        f"{cls.__name__}.{name}": _LEGAL if legal(field) else f"{field!r}, which is not {rule}"
        for name, (rule, legal) in rules.items()
        for field in [getattr(value, name)]
    }


def _whole(value: Any) -> bool:
    # `True` is an `int`; as a size or a count it is a mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _bytes_or_none(value: Any) -> bool:
    return value is None or (_whole(value) and value >= 0)


def _slab_size(value: Any) -> bool:
    # Blocks are cut into multiples of 512 bytes.
    return _whole(value) and value >= 512 and value.bit_count() == 1  # noqa: PLR2004


def _share(value: Any) -> bool:
    return isinstance(value, float | int) and not _flag(value) and 0 <= value <= 1


_SETUP_RULES: Final = {
    "backend": ("a string", _text),
    "pp_size": ("a whole number of at least 1", lambda value: _whole(value) and value >= 1),
    "compile": ("a boolean", _flag),
    "activation_checkpoint": ("a string", _text),
}
_POLICY_RULES: Final = {
    "min_bytes": ("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    "min_coverage": ("a number from 0 to 1", _share),
    "keep_last": ("a boolean", _flag),
    "fraction": (
        "a number above 0 and at most 1",
        lambda value: _share(value) and value > 0,
    ),
    "narrow": ("a boolean", _flag),
    "slab_bytes": ("a power of two, at least 512", _slab_size),
    "max_host_bytes": ("None or a whole number of at least 0", _bytes_or_none),
}
