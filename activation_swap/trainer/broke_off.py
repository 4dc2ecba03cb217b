# SPDX-License-Identifier: Apache-2.0
"""The error of a command that could not go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from activation_swap.errors import Reason

if TYPE_CHECKING:
    from activation_swap.errors import ActivationSwapError

__all__ = ["broke_off"]


def broke_off(cause: BaseException | str, *, where: object = None) -> ActivationSwapError:
    """Return AS417.

    Args:
        cause: What was raised, or found.
        where: File or process that it is about, if any.

    Returns:
        The error, to be raised by the caller.
    """
    if isinstance(cause, BaseException):
        first_line = str(cause).partition("\n")[0]
        cause = f"{type(cause).__name__}: {first_line}"
    return Reason.RUN_BROKE_OFF.error(found=cause, where=None if where is None else str(where))
