# SPDX-License-Identifier: Apache-2.0
"""What is read is what JSON can hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from activation_swap.trainer.plain_yaml import load_plain_yaml

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("{a: 1, b: 1.5, c: true, d: null, e: x, f: [1], g: {}}", None),
        ("a: -1_000\nb: .inf\nc: 0x10", None),
        ("a: 2026-11-29\nb: 1:30\nc: 1:30.5", {"a": "2026-11-29", "b": "1:30", "c": "1:30.5"}),
        ("2026-11-29: 1", {"2026-11-29": 1}),
        ("{'1': 1, a: 2}", {"1": 1, "a": 2}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", None),
        ("a: &a {<<: {x: 1}, x: 2}\nb: {<<: [*a, {y: 1}], x: 3}\nc: *a", None),
    ],
)
def test_value(text: str, expected: Any) -> None:
    """As of ``yaml.safe_load``, but for dates and numbers of base 60."""
    value = load_plain_yaml(text)
    assert value == (yaml.safe_load(text) if expected is None else expected)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: {c: 1, 'c': 2}", "key 'c' is there twice"),
        ("{1: 1}", "key '1' is not text"),
        ("{null: 1}", "key 'null' is not text"),
        ("{[a]: 1}", "is not text"),
        ("!!python/name:os.system", "could not determine a constructor"),
        ("!!set {a}", "could not determine a constructor"),
        ("!!binary aGk=", "could not determine a constructor"),
        ("!!timestamp 2026-11-29", "could not determine a constructor"),
        ("!!int many", "not a value of int"),
        ("!!int ''", "not a value of int"),
        ("!!int '-'", "not a value of int"),
        ("!!float ''", "not a value of float"),
        ("!!bool x", "not a value of bool"),
        ("1" * 5000, "not a value of int"),
        ("[" * 65 + "]" * 65, "nested more than 64 levels deep"),
        ("[" * 5000, "nested more than 64 levels deep"),
        ("{a: " * 3000, "nested more than 64 levels deep"),
    ],
)
def test_problem_is_named_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem) as caught:
        load_plain_yaml(text)
    assert "line " in str(caught.value)


def test_what_is_wide_is_not_deep() -> None:
    assert load_plain_yaml("[" * 64 + "]" * 64)
    assert load_plain_yaml("[" + "[], " * 100 + "]") == [[]] * 100


def test_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: [")
    with path.open("rb") as file, pytest.raises(yaml.YAMLError) as caught:
        load_plain_yaml(file)
    assert f'in "{path}", line 1' in str(caught.value)
