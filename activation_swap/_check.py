# SPDX-License-Identifier: Apache-2.0
"""One thing that was looked at, with what was found and what would have been right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from activation_swap.errors import ActivationSwapError, Reason

__all__ = ["Check", "compare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check. A refusal is a value here; whoever applies the swap raises it.

    Attributes:
        subject: What was looked at, in words.
        expected: What is right.
        found: What was found.
        rejection: The error to raise, or ``None`` when the check passed.
    """

    subject: str
    expected: str
    found: str
    rejection: ActivationSwapError | None = None

    @property
    def passed(self) -> bool:
        """Whether what was found is right."""
        return self.rejection is None

    def within(self, prefix: str) -> Check:
        """Return this check with ``prefix`` before the place that it refuses."""
        rejection = self.rejection
        if rejection is None or not prefix:
            return self
        return replace(self, rejection=rejection.within(prefix))


def compare(
    reason: Reason,
    subject: str,
    *,
    expected: str,
    found: Mapping[str, str],
    source: str | None = None,
) -> Check:
    """Compare what was found at each place with what is expected at all of them.

    Args:
        reason: Catalogue entry of a difference.
        subject: What is compared, in words.
        expected: Text that each place should show.
        found: Text found, by place (an FQN). An empty mapping passes: there is nothing to differ.
        source: What makes ``expected`` right. With it the message quotes both; without, it keeps
            the catalogue's text.

    Returns:
        A check whose rejection names every place that differs, equal findings together.
    """
    places: dict[str, list[str]] = {}
    for where, text in found.items():
        if text != expected:
            places.setdefault(text, []).append(where)
    if not places:
        return Check(subject=subject, expected=expected, found=expected if found else "none here")
    (first, wheres), *others = places.items()
    rejection = reason.error(
        found=first,
        where=_abbreviated(wheres),
        expected=None if source is None else f"{expected} ({source})",
        trace=tuple(f"{_abbreviated(where)}: found {text}" for text, where in others),
    )
    return Check(subject=subject, expected=expected, found=first, rejection=rejection)


def _abbreviated(wheres: Sequence[str]) -> str:
    first, *others = wheres
    return f"{first} (+{len(others)} more)" if others else first
