# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as JSON lines, one per step."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from activation_swap.errors import Reason
from activation_swap.trainer.disk import replace_files, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MetricsFile", "read_metrics"]

# How a last line begins that a crash cut off: as any line of a run, or with NULs.
_CUT_OFF = "{\0"


class _Line(BaseModel, extra="allow"):
    step: int = Field(ge=1, strict=True)


class MetricsFile:
    """Appends lines to a file. Each line is flushed, so that a crash loses none before it.

    Args:
        path: The file; its directory is made.
        after_step: Lines of later steps are dropped first: a resumed run writes them again. 0
            starts the file anew, and keeps the one that was there as ``metrics.jsonl.1``, or with
            the next number that is free.

    Raises:
        RejectedError: AS419 when a line cannot be read; the file is left as it is.
        SwapStateError: AS417 when the file cannot be written.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if after_step:
                kept = "".join(text for text, step in _lines(path) if step <= after_step)
                replace_files(path.parent, {path.name: lambda file: file.write_text(kept, "utf-8")})
            elif path.exists() and path.stat().st_size:
                path.rename(_free(path))
            self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line; ``step`` must be among the values. What JSON has no number for is null.

        Raises:
            SwapStateError: AS417 when it cannot be written.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file.

        Raises:
            SwapStateError: AS417 when what was written last is not in it.
        """
        with writing(self._path):
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; none when there is no file.

    The last line is left out when a crash cut it off. A file system may also have filled the end
    of the file with NULs when the machine itself stopped.

    Raises:
        RejectedError: AS419 when any other line is not a JSON object with a step.
    """
    for text, _ in _lines(path):
        yield json.loads(text)


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each line as it is in the file, and its step."""
    if not path.exists():
        return
    *lines, last = path.read_text("utf-8", errors="replace").split("\n")
    if last and last[0] not in _CUT_OFF:
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        yield f"{line}\n", _step(path, number, line)


def _step(path: Path, number: int, line: str) -> int:
    try:
        return _Line.model_validate_json(line).step
    except ValidationError as error:
        raise Reason.UNREADABLE_METRICS.error(
            found=f"{line[:80]!r} ({error.errors()[0]['msg']})", where=f"{path}: line {number}"
        ) from error


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
