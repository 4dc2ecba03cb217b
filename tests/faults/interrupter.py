# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt at a chosen line, where Python would handle Ctrl-C."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Interrupter"]

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
