# SPDX-License-Identifier: Apache-2.0
"""The catalogue is complete both ways: every entry is raised and tested, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import activation_swap
from activation_swap.compat.canary import tiny_model
from activation_swap.errors import ActivationSwapError, Reason, ReasonSpec
from tests.rejections.call_cases import CALL_CASES
from tests.rejections.case import MESSAGES, expected_text, stable_text
from tests.rejections.test_apply import APPLY_CASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rejections.case import ApplyCase, CallCase

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

PACKAGE = Path(activation_swap.__file__).parent
SOURCES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "errors.py"
}
TRANSLATED = {
    # What Python asks of a module's __getattr__.
    ("trainer/__init__.py", "AttributeError"),
    # A validator of pydantic speaks through ValueError; parse_config turns it into AS401.
    ("trainer/config.py", "ValueError"),
    # load_config turns it into AS402, which also says where.
    ("trainer/config.py", "TypeError"),
    ("trainer/plain_yaml.py", "MarkedYAMLError"),
    # reading_checkpoint turns it into AS409.
    ("trainer/checkpoint.py", "ValueError"),
    ("trainer/stream.py", "ValueError"),
    # writing turns it into AS417.
    ("trainer/checkpoint.py", "OSError"),
    # OutputDirectory turns it into AS415.
    ("trainer/output.py", "FileExistsError"),
    # What was raised in another process.
    ("trainer/own_process.py", "error"),
    ("trainer/ranks.py", "refusal[0]"),
    # main turns it into an exit code.
    ("trainer/__main__.py", "_Terminated"),
    # reading_model turns it into AS404.
    ("trainer/model.py", "ValueError"),
    # What Python raises through a weak reference; only a caller's own fault can bring it about.
    ("core/schedule/torch_pipelining.py", "ReferenceError"),
    # argparse turns it into its own message and exit status.
    ("trainer/plan.py", "ArgumentTypeError"),
}


@pytest.mark.parametrize("case", CALL_CASES, ids=lambda case: case.name)
def test_refusal(case: CallCase) -> None:
    with pytest.raises(ActivationSwapError) as refusal:
        case.call(tiny_model().train())

    error = refusal.value
    assert error.reason is case.reason
    assert type(error) is case.reason.value.kind
    assert stable_text(error) == expected_text(case.name)


def test_every_reason_has_a_case_and_every_case_a_name_of_its_own() -> None:
    cases: list[ApplyCase | CallCase] = [*APPLY_CASES, *CALL_CASES]

    assert {case.reason for case in cases} == set(Reason)
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []


def test_every_message_file_belongs_to_a_case() -> None:
    files = {path.stem for path in MESSAGES.glob("*.txt")}

    assert files == {case.name for case in (*APPLY_CASES, *CALL_CASES)}


def test_every_reason_has_exactly_one_raise_site() -> None:
    sites = Counter(
        node.attr
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Reason"
    )

    assert sites == Counter(reason.name for reason in Reason)


def is_catalogue_call(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "error"
        and isinstance(node.func.value, ast.Attribute)
        and ast.unparse(node.func.value.value) == "Reason"
    )


def factories() -> set[str]:
    """Return the functions of the package that return an error of the catalogue."""
    return {
        function.name
        for tree in SOURCES.values()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and is_catalogue_call(node.value)
    } | {"also"}


def raised(tree: ast.Module) -> Iterator[ast.expr]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.Module):
            continue
        assigned = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and node.exc is not None:
                named = isinstance(node.exc, ast.Name) and isinstance(function, ast.FunctionDef)
                if named and isinstance(node.exc, ast.Name):
                    yield assigned.get(node.exc.id, node.exc)
                elif not isinstance(node.exc, ast.Name):
                    yield node.exc


def test_every_raise_uses_the_catalogue() -> None:
    known, strangers = factories(), []
    for name, tree in SOURCES.items():
        for node in raised(tree):
            callee = node.func if isinstance(node, ast.Call) else node
            last = callee.attr if isinstance(callee, ast.Attribute) else ast.unparse(callee)
            if not (is_catalogue_call(node) or last in known or (name, last) in TRANSLATED):
                strangers.append(f"{name}:{node.lineno}: {ast.unparse(node)}")

    assert strangers == []


def test_translated_exceptions_are_still_raised() -> None:
    there = {
        (name, ast.unparse(node.func if isinstance(node, ast.Call) else node))
        for name, tree in SOURCES.items()
        for node in raised(tree)
    }

    assert there >= TRANSLATED


def test_entries_are_in_the_order_of_their_codes() -> None:
    codes = [reason.value.code for reason in Reason]

    assert codes == sorted(codes)


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.value.code)
def test_entry_is_well_formed(reason: Reason) -> None:
    spec: ReasonSpec = reason.value

    assert re.fullmatch(r"AS[1-6]\d\d", spec.code)
    assert [other for other in Reason if other.value.code == spec.code] == [reason]
    assert issubclass(spec.kind, ActivationSwapError)
    assert issubclass(spec.kind, ValueError | NotImplementedError | RuntimeError)
    for text in (spec.summary, spec.expected, spec.fix, spec.consequence):
        assert text
        assert not text.endswith(".")
    assert len(f"{spec.code}: {spec.summary}") < 100
