# SPDX-License-Identifier: Apache-2.0
"""The combinations of the table that are quick enough for every run of the tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.compose import table
from tests.compose.execution import run_all
from tests.compose.table import COMBINATIONS

if TYPE_CHECKING:
    from tests.compose.combination import Combination, Result

# The first test of each number of processes runs the others, too.
pytestmark = [pytest.mark.level0, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs"
QUICK = [key for key, combination in COMBINATIONS.items() if combination.quick]


@cache
def results(ranks: int) -> dict[str, Result]:
    """Run all quick combinations of so many processes, once."""
    return run_all([key for key in QUICK if COMBINATIONS[key].ranks == ranks], ranks=ranks)


@pytest.mark.parametrize("key", QUICK)
def test_combination(key: str) -> None:
    combination = COMBINATIONS[key]
    result = results(combination.ranks)[key]
    assert result.verdict is combination.expected, result.detail


def test_no_two_combinations_have_one_name() -> None:
    found = [c.key for m in vars(table).values() for c in _of_module(m)]
    assert sorted(found) == sorted(COMBINATIONS)


def _of_module(module: object) -> tuple[Combination, ...]:
    return getattr(module, "COMBINATIONS", ()) if isinstance(module, ModuleType) else ()


def test_the_documented_results_are_of_these_combinations() -> None:
    rows = json.loads((DOCS / "combinations.json").read_text("utf-8"))["combinations"]
    documented = {f"{row['tool']}: {row['name']}": row["result"] for row in rows}
    assert documented == {key: c.expected.value for key, c in COMBINATIONS.items()}
