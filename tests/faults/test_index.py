# SPDX-License-Identifier: Apache-2.0
"""Every field case has a test named after it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

CASES = (
    *("c01", "c03", "c05", "c06", "c07", "c08", "c10", "c12", "c13", "c14", "c16", "c18"),
    *("c20", "c21", "c22", "c24", "c25", "c27", "c28", "c32", "c33", "c34", "c35", "c36"),
    *("c37", "c39", "c40", "c42", "c43", "c44", "c46", "c47", "c48"),
)


def test_every_case_has_a_test(record_property: Any) -> None:
    names = [
        node.name
        for file in Path(__file__).parent.glob("test_cases_*.py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted({name.split("_")[1] for name in names}) == sorted(CASES)
    record_property("cases", len(CASES))
