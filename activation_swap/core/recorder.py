# SPDX-License-Identifier: Apache-2.0
"""The pack hook of one attention call: which saved tensors may move, one storage each."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from activation_swap._stats import KeepReason
from activation_swap.core.narrowing import is_upcast, narrow_from
from activation_swap.core.packed_tensor import PackedTensor
from activation_swap.core.saved_storage import SavedStorage
from activation_swap.core.torch_private import (
    base_of,
    is_parameter_cast,
    is_traceable_wrapper_subclass,
    wait_for_collective,
)
from activation_swap.core.wrapped_tensor import WrappedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from activation_swap._config import SwapPolicy
    from activation_swap.core.attention_calls import AttentionCalls
    from activation_swap.core.group import Group

__all__ = ["Recorder"]

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_MOVABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and "q" not in str(dtype)
)
"""Every dtype whose tensors are nothing but their bytes: no quantizer, no lazy conjugation."""


class _Over:
    """Stands for the calls of a recorder that is closed."""

    closed = True


_OVER = _Over()


class Recorder:
    """Collects what one call of one attention saves, and sorts it when the call ends.

    Sorted in one go: Python runs several times faster in a loop than between kernels. Until then
    every saved tensor is held, so that an address is an identity: the allocator cannot give it to
    another one.

    Args:
        group: The group to record into.
        policy: What may move.
        module: The attention, whose parameters and buffers stay where they are.
        arguments: The call's arguments, positional and by keyword: those that need no gradient
            (cos, sin, mask, positions) stay, too. Every layer saves them, and their owner is
            outside: moving them frees nothing.
        calls: Who opened this, and closes it.

    Attributes:
        group: See above; ``None`` once closed.
        index: Of the attention.
        kept_bytes: Of the storages that may not move, by reason.
    """

    __slots__ = (
        "_argument_addresses",
        "_arguments",
        "_autocast",
        "_calls",
        "_device",
        "_fqn",
        "_module",
        "_module_addresses",
        "_packed",
        "_parameters",
        "_policy",
        "group",
        "index",
        "kept_bytes",
    )

    def __init__(
        self,
        group: Group,
        policy: SwapPolicy,
        module: nn.Module,
        arguments: tuple[Any, ...],
        *,
        calls: AttentionCalls,
    ) -> None:
        self.group: Group | None = group
        self.index = group.index
        self.kept_bytes: dict[KeepReason, int] = {}
        self._fqn = group.fqn
        self._policy = policy
        self._module: nn.Module | None = module
        self._arguments = arguments
        self._calls: AttentionCalls | _Over = calls
        self._argument_addresses: set[int] | None = None
        self._module_addresses: set[int] | None = None
        self._device = group.link.transfer.device
        self._autocast = torch.is_autocast_enabled(self._device.type)
        self._packed: list[PackedTensor] = []
        self._parameters: dict[PackedTensor, bool] | None = None

    def pack(self, tensor: torch.Tensor) -> PackedTensor | WrappedTensor:
        """Take a tensor that autograd saves: the pack hook.

        Returns:
            What unpacks to a tensor with the same bits.
        """
        if self._calls.closed:
            # Removed inside of this call, whose end has no hook any more.
            self.close_interrupted()
            return self._kept(tensor)
        if type(tensor) not in _PLAIN:
            return self._pack_special(tensor)
        packed = PackedTensor()
        packed.fqn = self._fqn
        packed.version = tensor._version
        packed.alias = tensor
        self._packed.append(packed)
        return packed

    def sort(self) -> list[SavedStorage]:
        """Return what of the saved tensors may move: each storage once, however often it was saved.

        What happened to a tensor since its save, autograd would see as well: storages and graphs
        are those of now, and a change of the data is in the version.
        """
        group = self.group
        if group is None:
            return []
        storages: list[SavedStorage] = []
        # An empty storage, or one that FSDP2 has freed, has no address.
        min_bytes = max(1, self._policy.min_bytes)
        known: dict[int, SavedStorage | None] = {}
        for packed in self._packed:
            tensor = packed.alias
            if tensor is None:
                continue
            packed.alias = tensor.detach()
            if tensor.layout is not torch.strided:
                self._count(KeepReason.UNSUPPORTED, tensor.numel() * tensor.itemsize)
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            saved = known.get(address)
            if saved is None and address in known:
                # What holds a storage holds all of it: one reason to keep it is enough.
                continue
            nbytes = storage.nbytes()
            if saved is not None and saved.nbytes == nbytes:
                saved.add(packed, saved.view(tensor))
                continue
            reason = (
                KeepReason.SMALL
                if nbytes < min_bytes
                else self._reason_to_keep(packed, tensor, nbytes, address)
            )
            if reason is not None:
                known[address] = None
                self._count(reason, nbytes)
                continue
            narrow = tensor.dtype is torch.float32 and self._may_narrow(tensor, nbytes)
            saved = known[address] = SavedStorage(group, tensor, nbytes, narrow=narrow)
            storages.append(saved)
            saved.add(packed, None if saved.as_saved else saved.view(tensor))
        self._packed = []
        return storages

    def close_interrupted(self) -> None:
        """End the call that this records, in its thread: no hook did."""
        if not isinstance(self._calls, _Over):
            self._calls.close_interrupted()

    def close(self) -> None:
        """Let go of everything: autograd keeps the pack hook, and this object, with the graph.

        Repeatable. A recorder that is not closed keeps the graph, and so itself, alive for good.
        """
        self._calls = _OVER
        for packed in self._packed:
            # An interrupt or an error came before it was sorted.
            if packed.alias is not None:
                packed.alias = packed.alias.detach()
        self.group = None
        self._module = None
        self._arguments = ()
        self._argument_addresses = None
        self._module_addresses = None
        self._packed = []
        self._parameters = None

    def _count(self, reason: KeepReason, nbytes: int) -> None:
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + nbytes

    def _may_narrow(self, tensor: torch.Tensor, nbytes: int) -> bool:
        return (
            self._policy.narrow
            and nbytes >= narrow_from(max(1, self._policy.min_bytes))
            and tensor.nbytes == nbytes
            and tensor.is_contiguous()
            # Of a dimension of size 1, any stride is contiguous.
            and tensor.stride(-1) == 1
            and is_upcast(tensor)
        )

    def _reason_to_keep(
        self, packed: PackedTensor, tensor: torch.Tensor, nbytes: int, address: int
    ) -> KeepReason | None:
        base = base_of(tensor)
        root = tensor if base is None else base
        # What a subclass is, its parts are.
        parameter = None if self._parameters is None else self._parameters.get(packed)
        if parameter or (parameter is None and self._is_parameter(tensor, root)):
            return KeepReason.PARAMETER
        if tensor.device != self._device:
            return KeepReason.OTHER_DEVICE
        if tensor.dtype not in _MOVABLE or tensor.is_neg():
            return KeepReason.UNSUPPORTED
        if tensor.nbytes < nbytes:
            needed = self._policy.min_coverage * nbytes
            if tensor.nbytes < needed and _span_bytes(tensor) < needed:
                return KeepReason.PARTIAL_VIEW
        # Only what no operation of the graph has computed can live longer than the graph.
        return self._owner_elsewhere(tensor, address) if root.is_leaf else None

    def _owner_elsewhere(self, tensor: torch.Tensor, address: int) -> KeepReason | None:
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
            module = self._module
            self._module_addresses = (
                set()
                if module is None
                else _addresses(chain(module.parameters(), module.buffers()))
            )
        return self._module_addresses

    def _pack_special(
        self, tensor: torch.Tensor, *, parameter: bool | None = None
    ) -> PackedTensor | WrappedTensor:
        finished = wait_for_collective(tensor)
        if finished is not tensor:
            return self._pack_part(finished, parameter=parameter)
        if is_traceable_wrapper_subclass(tensor):
            # The local tensors of a DTensor, say: sizes and bytes are theirs, not the global ones.
            if parameter is None:
                base = base_of(tensor)
                parameter = self._is_parameter(tensor, tensor if base is None else base)
            return WrappedTensor(tensor, lambda part: self._pack_part(part, parameter=parameter))
        self._count(KeepReason.UNSUPPORTED, tensor.numel() * tensor.itemsize)
        return self._kept(tensor)

    def _pack_part(
        self, tensor: torch.Tensor, *, parameter: bool | None
    ) -> PackedTensor | WrappedTensor:
        if type(tensor) not in _PLAIN:
            return self._pack_special(tensor, parameter=parameter)
        packed = self.pack(tensor)
        if parameter is not None and isinstance(packed, PackedTensor):
            self._parameters = {packed: parameter} | (self._parameters or {})
        return packed

    def _kept(self, tensor: torch.Tensor) -> PackedTensor:
        packed = PackedTensor()
        packed.fqn = self._fqn
        packed.version = tensor._version
        packed.alias = tensor.detach()
        return packed


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if type(tensor) in _PLAIN and tensor.layout is torch.strided
    }


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
