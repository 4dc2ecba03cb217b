# SPDX-License-Identifier: Apache-2.0
"""The training calls of attentions: a recorder is open around each."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from activation_swap._stats import KeepReason
from activation_swap.core.call_guard import (
    check_call,
    check_recompute_flag,
    check_result,
    shallow_copy_error,
)
from activation_swap.core.group import Group
from activation_swap.core.packed_tensor import unpack
from activation_swap.core.recorder import Recorder
from activation_swap.core.torch_private import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from activation_swap.core.warning import warn
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from activation_swap._config import SwapPolicy
    from activation_swap.core.engine import Engine
    from activation_swap.core.hooked_site import HookedSite
    from activation_swap.core.link import Links
    from activation_swap.core.order import SwapOrder

__all__ = ["AttentionCalls"]


class _Open(threading.local):
    """The attention calls that this thread is inside of: a recorder, or the index of one without.

    Between them may be what was left by interrupts: module hooks see no KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.calls: list[Recorder | int] = []
        self.busy = False


class AttentionCalls:
    """Opens a recorder around each training call of an attention.

    Args:
        sites: The attentions in forward order.
        recorded: Indices of those whose saved tensors are taken.
        policy: What may move.
        engine: Takes the recorded groups.
        links: Gives a group its device's link.
        order: Decides what is taken, kept and released.

    Attributes:
        closed: Whether the hooks are off the model: nothing is recorded any more.
    """

    def __init__(
        self,
        sites: Sequence[HookedSite],
        *,
        recorded: frozenset[int],
        policy: SwapPolicy,
        engine: Engine,
        links: Links,
        order: SwapOrder,
    ) -> None:
        self._sites = sites
        self._policy = policy
        self._recorded = recorded
        self._engine = engine
        self._links = links
        self._order = order
        self._open = _Open()
        self.closed = False
        self._warned_of_cache = False

    def fqn(self, index: int) -> str:
        """Return the name of attention number ``index``."""
        return self._sites[index].fqn

    def enter(self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call: without grad there is nothing to save, and nothing is done.

        Raises:
            RejectedError: See :mod:`activation_swap.core.call_guard`; or hooks are disabled.
        """
        if self.closed:
            # Taken off inside of this very call, by a hook or a signal handler: torch goes on with
            # the hooks that it began with, and the end of the call has none any more.
            return
        self._open.busy = True
        try:
            self._enter(index, module, args, kwargs)
        finally:
            self._open.busy = False

    def _enter(
        self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        site = self._sites[index]
        calls = self._open.calls
        passive = not torch.is_grad_enabled() or index not in self._recorded
        outer = None if passive else self.close_interrupted()
        # Also of a call that is refused below: its end comes all the same.
        calls.append(index)
        check_recompute_flag(site)
        if passive:
            return
        expected = site.module()
        if expected is None or module is not expected:
            raise shallow_copy_error(site, module)
        if outer is not None:
            raise Reason.NESTED_ATTENTION.error(
                where=site.fqn, found=f"a call inside of {outer.group.fqn}"
            )
        if not self._warned_of_cache:
            self._check_cache(site, kwargs)
        link = self._links.of(_device_of(args, kwargs))
        check_call(site, link.transfer)
        if not self._order.admit(index):
            return
        previous = self._order.previous()
        group = Group(self._engine, fqn=site.fqn, index=index, link=link, previous=previous)
        recorder = Recorder(group, self._policy, site.module, (args, kwargs), calls=self)
        # An interrupt may come between any two lines: hooks without a recorder could not be mended.
        calls[-1] = recorder
        try:
            push_saved_tensor_hooks(recorder.pack, unpack)
        except RuntimeError as error:
            # torch.func's transforms, and whoever else calls disable_saved_tensors_hooks.
            calls[-1] = index
            recorder.close()
            raise Reason.HOOKS_DISABLED.error(where=site.fqn, found=str(error)) from error

    def leave(self, index: int, result: Any) -> None:
        """End a call, also one that raised: then ``result`` is ``None`` and nothing moves."""
        self._open.busy = True
        try:
            self._leave(index, result)
        finally:
            self._open.busy = False

    def _leave(self, index: int, result: Any) -> None:
        calls = self._open.calls
        while calls and _index_of(calls[-1]) != index:
            if not any(_index_of(call) == index for call in calls):
                return
            # What this call caught, and had not ended, of a call inside of it.
            self._drop_last()
        recorder = calls[-1] if calls else index
        if isinstance(recorder, int):
            del calls[-1:]
            return
        group = recorder.group
        self._pop_hooks_of(recorder)
        calls.pop()
        self._seal(recorder, KeepReason.FAILED if result is None else self._order.keep(group))
        if result is not None:
            self._order.sealed(group)
            check_result(self._sites[index], result)

    def close(self) -> None:
        """End what is recorded, once the hooks are off: other threads do at their next save."""
        self.closed = True
        if not self._open.busy:
            # Else by a signal handler between two lines of this class, which end as they began.
            self.close_interrupted()

    def close_interrupted(self) -> Recorder | None:
        """Mend what an interrupt left in this thread.

        Returns:
            A call that is no such thing, since other hooks are active inside of it; or ``None``.
        """
        calls = self._open.calls
        while calls:
            last = calls[-1]
            if not isinstance(last, int) and not self._pop_hooks_of(last):
                return last
            self._drop_last()
        return None

    def _drop_last(self) -> None:
        calls = self._open.calls
        last = calls[-1]
        if isinstance(last, int):
            calls.pop()
            return
        self._pop_hooks_of(last)
        calls.pop()
        self._seal(last, KeepReason.FAILED)

    @staticmethod
    def _pop_hooks_of(recorder: Recorder) -> bool:
        """Take the recorder's hooks off, if they are the innermost ones.

        They are not if an interrupt came after that, or if the attention has put others on and not
        taken off: then ``other_hooks`` takes these off when it meets them.

        Returns:
            Whether no other hooks are active.
        """
        top = top_saved_tensor_hooks()
        if top is not None and top[0] == recorder.pack:
            pop_saved_tensor_hooks()
            return True
        return top is None

    def _check_cache(self, site: HookedSite, kwargs: dict[str, Any]) -> None:
        for name in site.cache_arguments:
            if kwargs.get(name) is not None:
                self._warned_of_cache = True
                warn(
                    f"activation_swap: attention: {site.fqn} is given a key-value cache in a "
                    "training forward. It holds keys and values until it is dropped, and moving "
                    "them frees nothing before. Training needs no cache: pass use_cache=False.",
                )

    def _seal(self, recorder: Recorder, keep: KeepReason | None) -> None:
        try:
            storages = recorder.movable()
            self._engine.seal(recorder.group, storages, kept_bytes=recorder.kept_bytes, keep=keep)
        finally:
            recorder.close()


def _index_of(call: Recorder | int) -> int:
    return call if isinstance(call, int) else call.group.index


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that the call computes on: that of its first tensor.

    Not that of a parameter: under a CPU-offload policy of FSDP2 that is the host.
    """
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Tensor):
            return argument.device
    return torch.device("cpu")
