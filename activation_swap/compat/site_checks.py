# SPDX-License-Identifier: Apache-2.0
"""What would make a swap wrong or useless on any model: compilation, recomputation, other hooks.

Each check asks one thing of the sites that an adapter selected, or of what surrounds apply; none
changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from activation_swap._check import Check, compare
from activation_swap.compat.classes import qualified_name
from activation_swap.compat.forward import compiled_forward
from activation_swap.core.call_guard import other_hooks
from activation_swap.core.torch_private import compiled_call, forward_pre_hooks
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from activation_swap._site import Site

__all__ = ["check_sites"]

_OPTIMIZED_MODULE: Final = "torch._dynamo.eval_frame.OptimizedModule"
_CHECKPOINT_WRAPPERS: Final = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_COMPOSABLE_CHECKPOINT: Final = "torch.distributed._composable.checkpoint_activation"


def check_sites(sites: Sequence[Site], names: Mapping[nn.Module, str]) -> tuple[Check, ...]:
    """Check everything that no adapter needs to know about.

    Args:
        sites: Attention modules that would be swapped.
        names: Name of every module of the model.

    Returns:
        One check for each subject.
    """
    named: dict[str, nn.Module] = {}
    for site in sites:
        for depth, owner in enumerate(site.owners):
            named[names.get(owner, f"owners[{depth}] of {site.fqn}")] = owner
        for name, module in site.module.named_modules(prefix=site.fqn):
            named[names.get(module, name)] = module
    return (
        _eager(named),
        _no_checkpoint_wrapper(named),
        _no_checkpointing(sites, names),
        _materialised(sites),
        _each_once(sites),
        _no_other_hooks(),
        _not_traced(),
    )


def _eager(named: Mapping[str, nn.Module]) -> Check:
    return compare(
        Reason.COMPILED_MODEL,
        "torch.compile",
        expected="eager",
        found={name: _compilation(module) for name, module in named.items()},
    )


def _compilation(module: nn.Module) -> str:
    if qualified_name(type(module)) == _OPTIMIZED_MODULE:
        return "torch.compile(module)"
    if compiled_call(module):
        return "module.compile()"
    if compiled_forward(module):
        return "torch.compile(module.forward)"
    return "eager"


def _no_checkpoint_wrapper(named: Mapping[str, nn.Module]) -> Check:
    return compare(
        Reason.CHECKPOINT_WRAPPER,
        "checkpoint wrappers",
        expected="none",
        found={name: _checkpoint_wrapper(module) for name, module in named.items()},
    )


def _checkpoint_wrapper(module: nn.Module) -> str:
    if type(module).__module__ == _CHECKPOINT_WRAPPERS:
        return type(module).__name__
    hooks = forward_pre_hooks(module)
    if any(getattr(hook, "__module__", None) == _COMPOSABLE_CHECKPOINT for hook in hooks):
        return "torch.distributed._composable.checkpoint"
    return "none"


def _no_checkpointing(sites: Sequence[Site], names: Mapping[nn.Module, str]) -> Check:
    found = {}
    for site in sites:
        owner = site.checkpoint_flag_owner
        if owner is not None:
            on = getattr(owner, "gradient_checkpointing", False)
            found[names.get(owner, f"the flag owner of {site.fqn}")] = "on" if on else "off"
    return compare(Reason.CHECKPOINTING_ON, "gradient checkpointing", expected="off", found=found)


def _materialised(sites: Sequence[Site]) -> Check:
    found = {
        f"{site.fqn}.{name}": "meta" if tensor.is_meta else "materialised"
        for site in sites
        for name, tensor in _tensors(site.module)
    }
    return compare(Reason.META_DEVICE, "weights", expected="materialised", found=found)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _each_once(sites: Sequence[Site]) -> Check:
    first: dict[nn.Module, str] = {}
    found = {}
    for site in sites:
        earlier = first.setdefault(site.module, site.fqn)
        found[site.fqn] = "once" if earlier == site.fqn else f"the module of {earlier}"
    return compare(Reason.REPEATED_MODULE, "attention modules", expected="once", found=found)


def _no_other_hooks() -> Check:
    hooks = other_hooks()
    found = "none" if hooks is None else f"hooks that pack with {_name(hooks[0])}"
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, torch.detach):
            pass  # entering is the question; nothing is saved
    except RuntimeError as error:  # torch.func and disable_saved_tensors_hooks forbid them
        found = str(error)
    return compare(
        Reason.AMBIENT_SAVED_TENSOR_HOOKS,
        "other saved-tensor hooks",
        expected="none",
        found={"around apply": found},
    )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def _not_traced() -> Check:
    if torch.compiler.is_compiling():
        found = "torch.compile is tracing"
    elif torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        found = "torch.jit is tracing"
    elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        found = "a CUDA graph is being captured"
    else:
        found = "eager"
    return compare(Reason.TRACED, "execution", expected="eager", found={"around apply": found})
