# SPDX-License-Identifier: Apache-2.0
"""Who defined a forward, through the ways in which it is replaced."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from activation_swap.compat.forward import compiled_forward, foreign_forward, signature_of

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


def replacement(x: Any) -> Any:
    return x


class Patch:
    """A callable object."""

    def __call__(self, x: Any) -> Any:
        return x


@pytest.fixture
def linear() -> Any:
    return nn.Linear(2, 2)


def test_own_forward(linear: Any) -> None:
    assert foreign_forward(linear, package="torch") is None
    linear.forward = linear.forward  # what Transformers 4.54 to 5.1 leave behind
    assert foreign_forward(linear, package="torch") is None


@pytest.mark.parametrize(
    ("forward", "who"),
    [
        (replacement, f"replacement, defined in {__name__}"),
        (functools.partial(replacement), f"replacement, defined in {__name__}"),
        (functools.wraps(nn.Linear.forward)(lambda x: x), f"Linear.forward, defined in {__name__}"),
        (torch.no_grad()(replacement), f"replacement, defined in {__name__}"),
        (Patch(), f"{__name__}.Patch, defined in {__name__}"),
        (MethodType(Patch(), object()), f"{__name__}.Patch, defined in {__name__}"),
        (max, "max, defined in builtins"),
    ],
    ids=["function", "partial", "wraps", "decorated", "object", "bound object", "builtin"],
)
def test_replaced_forward_names_who_did_it(linear: Any, forward: Any, who: str) -> None:
    linear.forward = forward

    assert foreign_forward(linear, package="torch") == who


def test_compiled_forward(linear: Any) -> None:
    assert not compiled_forward(linear)
    linear.forward = torch.compiler.disable(linear.forward)
    assert not compiled_forward(linear)
    linear.forward = torch.compile(nn.Linear(2, 2).forward)
    assert compiled_forward(linear)


def test_signature_has_kinds_and_defaults_without_annotations() -> None:
    class Module(nn.Module):
        def forward(self, x: int, /, y: str = "a", *args: int, z: float = 1.0, **kw: int) -> None:
            """Take one parameter of each kind."""

    assert signature_of(Module) == "(self, x, /, y='a', *args, z=1.0, **kw)"
