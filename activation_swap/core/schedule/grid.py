# SPDX-License-Identifier: Apache-2.0
"""A schedule as a printable grid: one row per compute step, one column per rank."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from activation_swap.core.schedule.actions import LoweredStep, Step

__all__ = ["format_grid"]

_MARK = " <-- here"
_CONTEXT_ROWS = 8


def format_grid(
    ranks: Mapping[int, Sequence[Step | LoweredStep]], *, mark: tuple[int, int] | None = None
) -> str:
    """Print what each rank does, step by step. Rows count compute steps, not time.

    Args:
        ranks: By rank, its compute order or its lowered steps.
        mark: Rank and step to point at. The grid is then cut to the rows around it.

    Returns:
        Lines without a final newline.
    """
    names = [f"rank {rank}" for rank in sorted(ranks)]
    rows = list(zip_longest(*(ranks[rank] for rank in sorted(ranks)), fillvalue=""))
    first, last = 0, len(rows)
    if mark is not None:
        first = max(0, mark[1] - _CONTEXT_ROWS)
        last = min(len(rows), mark[1] + _CONTEXT_ROWS + 1)
    cells = [[f"step {index}:", *map(str, rows[index])] for index in range(first, last)]
    table = [["", *names], *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for index, line in enumerate(table, start=first - 1):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        marked = mark is not None and index == mark[1]
        lines.append(text.rstrip() + (_MARK if marked else ""))
    return "\n".join(lines)
