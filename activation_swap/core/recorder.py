# SPDX-License-Identifier: Apache-2.0
"""The pack hook of one attention call: which saved tensors may move, one storage each."""

from __future__ import annotations

import inspect
import re
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from activation_swap._stats import KeepReason
from activation_swap.core.narrowing import is_upcast, narrow_from
from activation_swap.core.packed_tensor import KeptTensor, PackedTensor, view_of
from activation_swap.core.saved_storage import SavedStorage
from activation_swap.core.torch_private import (
    base_of,
    identity_of,
    is_parameter_cast,
    is_traceable_wrapper_subclass,
    wait_for_collective,
)
from activation_swap.core.wrapped_tensor import WrappedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from activation_swap._config import SwapPolicy
    from activation_swap.core.attention_calls import AttentionCalls
    from activation_swap.core.group import Group

__all__ = ["Recorder"]

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_MOVABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not dtype.is_complex
    and not re.search(r"q|int[1-7]$", str(dtype))
)
"""Every dtype whose tensors are nothing but their bytes: no quantizer, no lazy conjugation, and no
integer of less than eight bits, which torch cannot copy."""

_MANY = 256
"""Storages after which a recorder asks whether its call still runs. An attention saves some 25."""


class Recorder:
    """Collects what one call of one attention saves.

    It lives for the call, and owns nothing of what it has seen: what the graph drops during the
    call is gone.

    Args:
        group: The group to record into.
        policy: What may move.
        module: Weak reference to the attention, whose parameters and buffers stay where they are.
        arguments: The call's arguments, positional and by keyword: those that need no gradient
            (cos, sin, mask, positions) stay, too. Every layer saves them, and their owner is
            outside: moving them frees nothing.
        calls: Who opened this, and closes it.
    """

    __slots__ = (
        "_argument_addresses",
        "_arguments",
        "_autocast",
        "_call_frame",
        "_calls",
        "_device",
        "_fqn",
        "_kept",
        "_known",
        "_min_bytes",
        "_min_coverage",
        "_module",
        "_module_addresses",
        "_narrow_from",
        "_room",
        "group",
        "kept_bytes",
    )

    def __init__(
        self,
        group: Group,
        policy: SwapPolicy,
        module: ref[nn.Module],
        arguments: tuple[Any, ...],
        *,
        calls: AttentionCalls,
    ) -> None:
        self.group = group
        self.kept_bytes: dict[KeepReason, int] = {}
        self._fqn = group.fqn
        # An empty storage holds nothing, and may be in several places.
        self._min_bytes = max(1, policy.min_bytes)
        self._min_coverage = policy.min_coverage
        self._narrow_from = narrow_from(self._min_bytes) if policy.narrow else None
        self._module = module
        self._arguments = arguments
        self._calls: AttentionCalls | None = calls
        self._argument_addresses: set[int] | None = None
        self._module_addresses: set[int] | None = None
        self._device = group.link.transfer.device
        self._autocast = torch.is_autocast_enabled(self._device.type)
        # Weak: a storage whose handles are gone was dropped with its graph, and another one may
        # have its identity. One that stayed is not asked for again: what is taken for it stays.
        self._known: dict[int, ref[SavedStorage]] = {}
        self._kept: dict[int, None] = {}
        self._room = _MANY
        # Up from `_caller`: this, `_enter`, `enter`, the hook; and torch's frame around the call.
        self._call_frame = id(_caller(5))

    def pack(
        self, tensor: torch.Tensor, *, parameter: bool | None = None
    ) -> PackedTensor | KeptTensor | WrappedTensor:
        """Take a tensor that autograd saves: the pack hook.

        It runs some thirty times per attention, so that its common paths are written out.

        Args:
            tensor: What is saved.
            parameter: Whether it is one, or ``None`` to find out.

        Returns:
            A handle that does not hold ``tensor`` itself.
        """
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return self._pack_special(tensor, parameter=parameter)
        storage = tensor.untyped_storage()
        identity = identity_of(storage)
        known = self._known.get(identity)
        if known is not None:
            saved = known()
            if saved is not None and not tensor.is_nested:
                return PackedTensor(saved, tensor, view_of(saved, tensor))
        # What holds a storage holds all of it: one reason to keep it is enough.
        if identity in self._kept:
            return KeptTensor((self._fqn, tensor.detach(), tensor._version))
        self._room -= 1
        if self._calls is None or self._calls.closed or (not self._room and self._left_over()):
            # Removed inside of this call, whose end has no hook any more; or interrupted in it.
            self.close_interrupted()
            return KeptTensor((self._fqn, tensor.detach(), tensor._version))
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes:
            reason = KeepReason.SMALL
        else:
            why = self._reason_to_keep(tensor, nbytes, parameter=parameter)
            if why is None:
                narrow = tensor.dtype is torch.float32 and self._may_narrow(tensor, nbytes)
                saved = SavedStorage(self.group, tensor, nbytes, narrow=narrow)
                self._known[identity] = ref(saved)
                view = None if saved.as_saved else view_of(saved, tensor)
                return PackedTensor(saved, tensor, view)
            reason = why
        self._kept[identity] = None
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + nbytes
        return KeptTensor((self._fqn, tensor.detach(), tensor._version))

    def movable(self) -> list[SavedStorage]:
        """Return the storages that may move, and have the memory that they had when saved.

        One that was resized since is left to its owner, as in plain autograd: a copy would read
        memory that is not its own.
        """
        whole = []
        for known in self._known.values():
            saved = known()
            if saved is None:
                continue
            if saved.aliases and saved.aliases[0][0].untyped_storage().nbytes() == saved.nbytes:
                whole.append(saved)
            else:
                self._count(KeepReason.CHANGED, saved.nbytes)
        return whole

    def close_interrupted(self) -> None:
        """End the call that this records, in its thread: no hook did."""
        if self._calls is not None:
            self._calls.close_interrupted()

    def close(self) -> None:
        """Let go of everything: autograd keeps the pack hook, and this object, with the graph."""
        del self.group
        self._calls = None
        self._arguments = ()
        self._argument_addresses = None
        self._module_addresses = None
        self._known = {}
        self._kept = {}

    def _left_over(self) -> bool:
        """Whether the call that this records was left by an interrupt: no end of it was seen.

        Asked seldom. Until then the saves of others are taken for the attention's, in a group that
        never moves.
        """
        self._room = _MANY
        frame = inspect.currentframe()
        while frame is not None:
            if id(frame) == self._call_frame:
                return False
            frame = frame.f_back
        return True

    def _count(self, reason: KeepReason, nbytes: int) -> None:
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + nbytes

    def _may_narrow(self, tensor: torch.Tensor, nbytes: int) -> bool:
        return (
            self._narrow_from is not None
            and nbytes >= self._narrow_from
            and tensor.nbytes == nbytes
            and tensor.is_contiguous()
            # Of a dimension of size 1, any stride is contiguous.
            and tensor.stride(-1) == 1
            and is_upcast(tensor)
        )

    def _reason_to_keep(
        self, tensor: torch.Tensor, nbytes: int, *, parameter: bool | None
    ) -> KeepReason | None:
        base = base_of(tensor)
        root = tensor if base is None else base
        if parameter or (parameter is None and self._is_parameter(tensor, root)):
            return KeepReason.PARAMETER
        if tensor.device != self._device:
            return KeepReason.OTHER_DEVICE
        if tensor.dtype not in _MOVABLE or tensor.is_neg() or tensor.is_nested:
            return KeepReason.UNSUPPORTED
        if tensor.nbytes < nbytes:
            needed = self._min_coverage * nbytes
            if tensor.nbytes < needed and _span_bytes(tensor) < needed:
                return KeepReason.PARTIAL_VIEW
        # Only what no operation of the graph has computed can live longer than the graph.
        return self._owner_elsewhere(tensor) if root.is_leaf else None

    def _owner_elsewhere(self, tensor: torch.Tensor) -> KeepReason | None:
        address = _address(tensor)
        if address is None:
            return KeepReason.UNSUPPORTED
        if not tensor.requires_grad and address in self._addresses_of_arguments():
            return KeepReason.ARGUMENT
        return KeepReason.PARAMETER if address in self._addresses_of_module() else None

    def _is_parameter(self, tensor: torch.Tensor, root: torch.Tensor) -> bool:
        kind = type(root)
        if kind is nn.Parameter or type(tensor) is nn.Parameter:
            return True
        # `isinstance` runs Python code for Parameter, and a plain tensor never is one.
        if kind is not torch.Tensor and isinstance(root, nn.Parameter):
            return True
        # Autocast's copy of a trainable weight lives in its cache: moving it frees nothing. That
        # of a frozen weight is made for this call alone, and moves like any other saved tensor.
        return self._autocast and is_parameter_cast(root)

    def _addresses_of_arguments(self) -> set[int]:
        if self._argument_addresses is None:
            self._argument_addresses = _addresses(
                tensor for tensor in _tensors(self._arguments) if not tensor.requires_grad
            )
        return self._argument_addresses

    def _addresses_of_module(self) -> set[int]:
        # Read inside of the call: FSDP2 gathers parameters into new storages just before it.
        if self._module_addresses is None:
            module = self._module()
            self._module_addresses = (
                set()
                if module is None
                else _addresses(chain(module.parameters(), module.buffers()))
            )
        return self._module_addresses

    def _pack_special(
        self, tensor: torch.Tensor, *, parameter: bool | None
    ) -> PackedTensor | KeptTensor | WrappedTensor:
        finished = wait_for_collective(tensor)
        if finished is not tensor:
            return self.pack(finished, parameter=parameter)
        if is_traceable_wrapper_subclass(tensor) and not tensor.is_nested:
            # The local tensors of a DTensor, say: sizes and bytes are theirs, not the global ones.
            if parameter is None:
                base = base_of(tensor)
                parameter = self._is_parameter(tensor, tensor if base is None else base)
            return WrappedTensor(
                self._fqn, tensor, lambda inner: self.pack(inner, parameter=parameter)
            )
        self._count_unsupported(tensor)
        return KeptTensor((self._fqn, tensor.detach(), tensor._version))

    def _count_unsupported(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # A sparse tensor, say: it has several, and no way to tell that it was seen before.
            self._count(KeepReason.UNSUPPORTED, tensor.numel() * tensor.itemsize)
            return
        identity = identity_of(storage)
        if identity not in self._kept:
            self._kept[identity] = None
            self._count(KeepReason.UNSUPPORTED, storage.nbytes())


def _caller(depth: int) -> FrameType | None:
    """Return the frame that is so far up from here. It has the same identity while it runs."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = None if frame is None else frame.f_back
    return frame


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    found = {
        _address(tensor)
        for tensor in tensors
        if type(tensor) in _PLAIN and tensor.layout is torch.strided
    }
    return {address for address in found if address is not None}


def _address(tensor: torch.Tensor) -> int | None:
    """Return where the tensor's storage is: its owner may be another one, as from numpy.

    ``None`` for what has no memory: a zero of forward-mode differentiation, a batch of ``vmap``.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes between the first and the last element of a view, both included."""
    if tensor.numel() == 0:
        return 0
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return (steps + 1) * tensor.itemsize


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dict values of arguments."""
    found: list[torch.Tensor] = []
    pending = [arguments]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
    return found
