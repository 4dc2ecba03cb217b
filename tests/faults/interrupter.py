# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt at a chosen line, where Python would handle Ctrl-C."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Interrupter", "Remover", "interrupted_removals"]

FINAL = frozenset({"__init__", "__del__", "forget", "give_back"})


class Interrupter:
    """Raises at the n-th line that runs in some files: where Python would handle Ctrl-C.

    Finalizers are left alone, and constructors, whose half-made objects have one: what a finalizer
    raises, Python prints and drops.
    """

    def __init__(self, number: int, files: frozenset[str]) -> None:
        self.number, self.files, self.lines = number, files, 0

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def interrupt(self) -> None:
        """Interrupt here."""
        raise KeyboardInterrupt

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        known: FrameType | None = frame
        if frame.f_code.co_filename not in self.files:
            return None
        # What a finalizer calls is part of it.
        while known is not None and known.f_code.co_filename in self.files:
            if known.f_code.co_name in FINAL:
                return None
            known = known.f_back
        return self._line

    def _line(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.interrupt()
        return self._line


class Remover(Interrupter):
    """What a signal handler does that removes the swap, between two lines of its removal."""

    def __init__(self, number: int, files: frozenset[str], swap: Any) -> None:
        super().__init__(number, files)
        self.swap = swap

    def interrupt(self) -> None:
        """Remove it here."""
        self.swap.remove()


def interrupted_removals(
    begin: Callable[[], Any], files: frozenset[str], *, again: bool
) -> Iterator[tuple[int, Any]]:
    """Remove a swap that is interrupted, one line further each time, and then removed once more.

    Args:
        begin: Returns a new swap.
        files: Where the lines count.
        again: Whether a second removal runs at the line, in place of an exception.

    Yields:
        The number of the line and the swap, until no line is left.
    """
    number = lines = 0
    while number <= lines:
        number += 1
        swap = begin()
        trace = Remover(number, files, swap) if again else Interrupter(number, files)
        with suppress(KeyboardInterrupt), trace:
            swap.remove()
        lines = trace.lines
        swap.remove()
        yield number, swap
