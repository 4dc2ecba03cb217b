# SPDX-License-Identifier: Apache-2.0
"""A combination with other training tools: how to check it, and what came of it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from activation_swap.errors import ActivationSwapError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from activation_swap.errors import Reason
    from tests.compose.run import Figures

__all__ = ["Combination", "Result", "Verdict", "execute", "merge"]


class Verdict(StrEnum):
    """What a combination came to."""

    SUPPORTED = "supported"
    REFUSED = "refused"
    UNTESTED = "untested"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One row of the table.

    Attributes:
        tool: What activation swap is combined with.
        name: How, in a few words; unique for the tool.
        check: Trains plain and swapped, raises where they differ; ``None`` if nothing can be run.
        ranks: Processes that run it, over gloo.
        quick: Whether ``make test`` runs it.
        refused: The refusal that ``check`` must end in, or ``None`` where it must succeed.
        remark: For the table: a rule, a limit, or why it is untested.
    """

    tool: str
    name: str
    check: Callable[[], Figures | None] | None = None
    ranks: int = 1
    quick: bool = True
    refused: Reason | None = None
    remark: str = ""

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.tool}: {self.name}"

    @property
    def expected(self) -> Verdict:
        """What must come of it."""
        if self.check is None:
            return Verdict.UNTESTED
        return Verdict.SUPPORTED if self.refused is None else Verdict.REFUSED


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a combination.

    Attributes:
        verdict: In a word.
        detail: The refusal, or the traceback of a failure.
        figures: Bytes of the last step, on rank 0.
    """

    verdict: Verdict
    detail: str = ""
    figures: Figures = field(default_factory=dict)


def execute(combination: Combination) -> Result:
    """Check a combination on this rank."""
    if combination.check is None:
        return Result(verdict=Verdict.UNTESTED)
    try:
        figures = combination.check() or {}
    except ActivationSwapError as error:
        if error.reason is combination.refused:
            spec = error.reason.value
            detail = f"{spec.code} {error.reason.name}: {spec.summary}"
            return Result(verdict=Verdict.REFUSED, detail=detail)
        return Result(verdict=Verdict.FAILED, detail=traceback.format_exc())
    except Exception:  # noqa: BLE001 - whatever it is, the next combination runs
        return Result(verdict=Verdict.FAILED, detail=traceback.format_exc())
    if combination.refused is not None:
        return Result(verdict=Verdict.FAILED, detail="it was not refused")
    return Result(verdict=Verdict.SUPPORTED, figures=figures)


def merge(results: Sequence[Result]) -> Result:
    """Return the result of all ranks: a failure of any, or that of rank 0."""
    for rank, result in enumerate(results):
        if result.verdict is Verdict.FAILED:
            return Result(verdict=Verdict.FAILED, detail=f"rank {rank}: {result.detail}")
    return results[0]
