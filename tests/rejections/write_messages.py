# SPDX-License-Identifier: Apache-2.0
"""Write the expected texts anew: ``python -m tests.rejections.write_messages``; then read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from activation_swap.compat.canary import tiny_model
from activation_swap.errors import ActivationSwapError
from tests.rejections.call_cases import CALL_CASES
from tests.rejections.case import MESSAGES, ApplyCase, stable_text
from tests.rejections.test_apply import APPLY_CASES

if TYPE_CHECKING:
    from tests.rejections.case import CallCase


def bring_about(case: ApplyCase | CallCase, model: Any) -> None:
    """Do what the case says is refused."""
    if isinstance(case, ApplyCase):
        request = case.arrange(model)
        with request.around():
            request.apply()
    else:
        case.call(model)


def main() -> None:
    MESSAGES.mkdir(exist_ok=True)
    for stale in MESSAGES.glob("*.txt"):
        stale.unlink()
    for case in (*APPLY_CASES, *CALL_CASES):
        try:
            bring_about(case, tiny_model().train())
        except ActivationSwapError as error:
            (MESSAGES / f"{case.name}.txt").write_text(stable_text(error), encoding="utf-8")


if __name__ == "__main__":
    main()
