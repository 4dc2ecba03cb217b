# SPDX-License-Identifier: Apache-2.0
"""Every check of a model with its result: what ``explain`` returns and ``apply`` acts on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from activation_swap._check import Check
    from activation_swap._site import Site
    from activation_swap.errors import ActivationSwapError

__all__ = ["Explanation"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """Every check of a model with its result; ``print`` it.

    Checks that need what an earlier one refused are not made.

    Attributes:
        checks: In the order in which they were made.
        sites: Attention modules that are, or would be, swapped.
        notices: What ``apply`` would warn of.
    """

    checks: tuple[Check, ...]
    sites: tuple[Site, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def rejections(self) -> tuple[ActivationSwapError, ...]:
        """The errors that ``apply`` would raise: the first, with the others on it."""
        return tuple(check.rejection for check in self.checks if check.rejection is not None)

    @property
    def supported(self) -> bool:
        """Whether ``apply`` with the same model, set-up and policy would succeed."""
        return not self.rejections

    def __str__(self) -> str:
        verdict = f"{len(self.sites)} attention modules" if self.supported else "refused"
        lines = [f"activation_swap: attention: {verdict}"]
        for check in self.checks:
            if check.rejection is None:
                lines.append(f"  ok     {check.subject}: {check.found}")
            else:
                code, where = check.rejection.code, check.rejection.where
                lines.append(f"  {code}  {check.subject}: {check.found}, at {where}")
                lines.append(f"         expected {check.expected}")
        lines.extend(f"  note   {notice}" for notice in self.notices)
        return "\n".join(lines)

    def raise_first(self) -> None:
        """Raise the first rejection, with the findings of all others on it."""
        if self.rejections:
            first, *others = self.rejections
            raise first.also(others)
