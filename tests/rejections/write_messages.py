"""Write the expected texts anew: ``python -m tests.rejections.write_messages``; then read them."""

from __future__ import annotations

from activation_swap.compat.canary import tiny_model
from activation_swap.errors import ActivationSwapError
from tests.rejections.test_apply import APPLY_CASES, MESSAGES


def main() -> None:
    MESSAGES.mkdir(exist_ok=True)
    for stale in MESSAGES.glob("*.txt"):
        stale.unlink()
    for case in APPLY_CASES:
        request = case.arrange(tiny_model().train())
        try:
            with request.around():
                request.apply()
        except ActivationSwapError as error:
            (MESSAGES / f"{case.name}.txt").write_text(f"{error}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
