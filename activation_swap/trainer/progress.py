# SPDX-License-Identifier: Apache-2.0
"""The progress bar."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Advance", "step_progress"]


class Advance(Protocol):
    """Moves the bar on."""

    def __call__(self, *, loss: float) -> None:
        """Count one more step and show its loss."""


@contextmanager
def step_progress(description: str, *, total: int, done: int = 0) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs.

    Args:
        description: Text before the bar.
        total: Steps in all.
        done: Steps done before.

    Yields:
        A function to call after each step.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, completed=done, loss="-")

        def advance(*, loss: float) -> None:
            bar.update(task, advance=1, loss=f"{loss:.4f}")

        yield advance
