# SPDX-License-Identifier: Apache-2.0
"""Every private torch name that this package touches, in one place.

But for those of pipelining, which ``schedule/torch_pipelining`` and ``schedule/torch_orders`` have
among them. Each function says what it reads, why no public name serves, and since when the name
exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "base_of",
    "compiled_call",
    "copy_all",
    "current_stream",
    "drop_forward_hooks",
    "forward_pre_hooks",
    "free_pinned_cache",
    "identity_of",
    "in_backward",
    "input_dtype_of_cast",
    "is_compiled",
    "is_parameter_cast",
    "is_replica",
    "is_traceable_wrapper_subclass",
    "negative_view",
    "pop_saved_tensor_hooks",
    "profiling",
    "push_saved_tensor_hooks",
    "top_saved_tensor_hooks",
    "under_dynamo",
    "wait_for_collective",
]

_autograd = torch._C._autograd
_eval_frame = torch._C._dynamo.eval_frame

# What `saved_tensors_hooks.__enter__` and `__exit__` call (2.0+). The context manager would need
# an object per attention call and cannot be left from another frame than the one that entered it.
push_saved_tensor_hooks = _autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _autograd._pop_saved_tensors_default_hooks

# The tensor that a tensor is a differentiable view of, or None (``Tensor._base``). The descriptor's
# own getter: a Python function around it would cost three times as much, in every pack.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = vars(torch._C.TensorBase)["_base"].__get__

# The storage itself, as a number, whoever asks through which view (``UntypedStorage._cdata``). Not
# its address, which is another storage's once FSDP2 has freed a weight. The getter, as above.
identity_of: Callable[[torch.UntypedStorage], int] = vars(torch._C.StorageBase)["_cdata"].__get__


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost active (pack, unpack) pair of this thread, or ``None`` (2.8+)."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass: a recomputation (2.6+)."""
    return torch._C._current_graph_task_id() != -1


def under_dynamo() -> bool:
    """Whether this frame runs below a ``torch.compile`` call, traced or fallen back (2.6+).

    ``torch.compiler.is_compiling`` is true only while tracing; a frame that dynamo gave up on runs
    eagerly with the callback still set.
    """
    return _eval_frame.get_eval_frame_callback() not in {None, False}


def compiled_call(*modules: nn.Module) -> bool:
    """Whether ``.compile()`` was called on one of them; its class name does not show it (2.1+)."""
    for module in modules:  # noqa: SIM110 - a generator costs more than the loop
        if module._compiled_call_impl is not None:
            return True
    return False


def is_compiled(function: Any) -> bool:
    """Whether ``torch.compile`` made this function (2.0+).

    ``torch.compiler.disable`` marks its result in the same way, and says so.
    """
    made = hasattr(function, "_torchdynamo_orig_callable")
    return made and not getattr(function, "_torchdynamo_disable", False)


def is_replica(module: nn.Module) -> bool:
    """Whether ``module`` is one of the copies that DataParallel calls (1.0+)."""
    return getattr(module, "_is_replica", False)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that reads as ``-tensor`` (1.10+): the lazy bit of ``Tensor.is_neg``."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view


def input_dtype_of_cast(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that ``tensor`` was cast from, when its own graph node is that cast.

    ``ToCopyBackward0`` is the node of ``Tensor.to(dtype)``; the node before it records the
    metadata of what it put out, which is the cast's input (``_input_metadata``, 2.1+).
    ``ViewBackward0``, that of ``Tensor.view(size)``, may lie between: same elements, same order.
    Any other node may be one of a kernel that writes without a word.
    """
    node = tensor.grad_fn
    if node is not None and node.name() == "ViewBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    producer, output_nr = node.next_functions[0]
    if producer is None:
        return None
    metadata = producer._input_metadata
    if output_nr >= len(metadata):
        return None
    dtype: torch.dtype = metadata[output_nr].dtype
    return dtype


def is_parameter_cast(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a cast or a view of a trainable parameter, up to four steps away.

    Autocast's copy of a weight has a storage of its own, and no attribute leads to the parameter:
    only the graph does, whose leaf node holds it as ``variable``.
    """
    node = tensor.grad_fn
    for _ in range(4):
        if node is None:
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            return isinstance(variable, nn.Parameter)
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def profiling() -> bool:
    """Whether a profiler records: a range costs microseconds even when nobody looks."""
    enabled: bool = _autograd._profiler_enabled()
    return enabled


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Return the finished tensor of an asynchronous collective; any other tensor as it is."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def current_stream(device_index: int) -> torch.Stream:
    """Return the calling thread's current stream.

    What ``torch.accelerator.current_stream`` calls (2.6+), without parsing a device each time: it
    is asked for twice in every attention.
    """
    stream: torch.Stream = torch._C._accelerator_getStream(device_index)
    return stream


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target without blocking: one call from Python (2.1+).

    They are equal in dtype, size and stride, so that each is one copy of bytes and no kernel.
    """
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def free_pinned_cache() -> None:
    """Give unused pinned blocks of torch's caching host allocator back to the system (2.7+)."""
    torch._C._host_emptyCache()


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the forward pre-hooks on ``module``."""
    return list(module._forward_pre_hooks.values())


def drop_forward_hooks(module: nn.Module, kind: type) -> None:
    """Remove forward and pre-forward hooks that are instances of ``kind``.

    A copied or unpickled module carries copies of hook objects without the handles to remove them.
    """
    for hooks, companions in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[key]
            for companion in companions:
                companion.pop(key, None)
