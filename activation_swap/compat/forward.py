# SPDX-License-Identifier: Apache-2.0
"""Who defined the forward that a module will run."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from activation_swap.compat.classes import qualified_name
from activation_swap.core.torch_private import is_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["compiled_forward", "foreign_forward", "signature_of"]


def signature_of(cls: type[nn.Module]) -> str:
    """Return the parameters of ``cls.forward``, with kinds and defaults, without annotations."""
    signature = inspect.signature(cls.forward)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def foreign_forward(module: nn.Module, *, package: str) -> str | None:
    """Return who replaced the forward of ``module``, or ``None`` when ``package`` defined it.

    A function's globals belong to the file that it was written in; ``functools.wraps`` copies the
    name and the module of what it decorates, and hides the decorator otherwise.

    Args:
        module: A module whose class is one of ``package``'s.
        package: Top-level name of the package that may define and decorate the forward.
    """
    for function in _layers(_forward(module)):
        home = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if home.partition(".")[0] != package:
            name = getattr(function, "__qualname__", qualified_name(type(function)))
            return f"{name}, defined in {home}"
    return None


def compiled_forward(module: nn.Module) -> bool:
    """Whether the forward of ``module`` went through ``torch.compile``."""
    return any(map(is_compiled, _layers(_forward(module))))


def _forward(module: nn.Module) -> Callable[..., Any]:
    # Transformers 4.54 to 5.1 leave the module's own bound method in its __dict__ after a call
    # with output_attentions; it shows as the class's function, as it should.
    forward: Callable[..., Any] = vars(module).get("forward", type(module).forward)
    return forward


def _layers(function: Any) -> Iterator[Any]:
    """Yield a callable and what it wraps, outermost first."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)
