# SPDX-License-Identifier: Apache-2.0
"""Names of classes, through the renaming and wrapping that training frameworks do.

Nothing here imports torch, so that a model class can be looked up without it.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["WRAPPER_ATTRIBUTES", "original_class", "peel", "qualified_name"]

WRAPPER_ATTRIBUTES: Final = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": (
        "_checkpoint_wrapped_module"
    ),
}
"""Modules that stand in for another one, and where they keep it."""


def qualified_name(cls: type) -> str:
    """Return module path and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def original_class(cls: type) -> type:
    """Return the class that ``fully_shard`` or ``replicate`` made ``cls`` from, or ``cls``.

    Both give a module a class made on the fly from their own mixin and the module's class, named
    prefix + name. A user's subclass is written in a user's module and stays what it is.
    """
    while (
        cls.__module__.startswith("torch.distributed.")
        and len(cls.__bases__) > 1
        and cls.__name__.endswith(cls.__bases__[1].__name__)
    ):
        cls = cls.__bases__[1]
    return cls


def peel(module: Any) -> tuple[Any, ...]:
    """Return ``module``, the module that it wraps, and so on; outermost first."""
    chain = [module]
    while (attribute := WRAPPER_ATTRIBUTES.get(qualified_name(type(chain[-1])))) is not None:
        chain.append(getattr(chain[-1], attribute))
    return tuple(chain)
