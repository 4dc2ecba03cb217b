# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as JSON lines, one per step."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["MetricsFile", "read_metrics"]


class MetricsFile:
    """Appends lines to a file. Each line is flushed, so that a crash loses none before it.

    Args:
        path: The file; its directory is made.
        after_step: Lines of later steps are dropped first: a resumed run writes them again. 0
            starts the file anew.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] <= after_step]
        fresh = path.with_name(f".{path.name}.unfinished")
        fresh.write_text("".join(_line(line) for line in kept), "utf-8")
        fresh.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line; ``step`` must be among the values. What is not finite becomes null."""
        legal = {name: _finite(value) for name, value in values.items()}
        self._file.write(_line(legal))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; none when there is no file.

    The last line is left out when a crash cut it off. Reading ends at the first line that is not
    JSON: a file system may fill the end of a file with NULs when the machine itself stops.
    """
    if not path.exists():
        return
    for line in path.read_text("utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values) + "\n"
