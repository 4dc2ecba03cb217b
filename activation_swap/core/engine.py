# SPDX-License-Identifier: Apache-2.0
"""Moves groups: offload after the attention, release, prefetch, reload before its backward."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, suppress
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch

from activation_swap._stats import KeepReason
from activation_swap.core.counters import Counters
from activation_swap.core.group import Group, GroupState
from activation_swap.core.narrowing import upper_halves
from activation_swap.core.pinned_pool import aligned
from activation_swap.core.torch_private import profiling
from activation_swap.core.transfer import Copy
from activation_swap.core.warning import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from activation_swap._stats import SwapStats
    from activation_swap.core.link import Links
    from activation_swap.core.saved_storage import SavedStorage

__all__ = ["Engine"]

_NO_CONTEXT = nullcontext()


class Engine:
    """The state of one swap: its groups, its links, its counters.

    Every method may be called from any thread: forward runs on the caller's, backward on autograd's
    threads of the devices. :meth:`forget` takes no lock: the garbage collector drops graphs at any
    place, in a method of this engine or of another one.

    Args:
        links: The transfers and pools of the devices.
        ahead: How many groups are reloaded ahead of the one whose backward begins.
    """

    def __init__(self, links: Links, *, ahead: int = 1) -> None:
        self._links = links
        self._ahead = ahead
        self._lock = RLock()
        self._counters = Counters()
        self._groups: WeakSet[Group] = WeakSet()
        self._forgotten: deque[int] = deque()
        self._warned = False

    def seal(
        self,
        group: Group,
        storages: Sequence[SavedStorage],
        *,
        kept_bytes: Mapping[KeepReason, int],
        keep: KeepReason | None,
    ) -> None:
        """End the recording of a group: launch its offload, or leave it on the device.

        Args:
            group: A group in state RECORDING.
            storages: Its eligible storages, strong references.
            kept_bytes: Bytes of the storages that are not eligible, by reason.
            keep: Why the whole group stays, or ``None`` to move it.
        """
        with self._lock:
            for reason, nbytes in kept_bytes.items():
                self._counters.kept_bytes[reason] += nbytes
            if not storages:
                group.move_to(GroupState.RESIDENT)
                return
            group.storages = [ref(storage) for storage in storages]
            group.device_bytes = sum([storage.nbytes for storage in storages])
            self._groups.add(group)
            self._gain(group.device_bytes)
            if keep is None and not self._offload(group, storages):
                keep = KeepReason.HOST_MEMORY
            if keep is not None:
                self._counters.kept_bytes[keep] += group.device_bytes
                group.move_to(GroupState.RESIDENT)

    def _offload(self, group: Group, storages: Sequence[SavedStorage]) -> bool:
        """Launch the D2H copies of a group; ``False`` when there is no host memory for it."""
        # Versions are compared when the device memory is given up: a change before the copy, or
        # during it, is seen there, and the storage stays.
        nbytes = 0
        spans = []
        for storage in storages:
            spans.append(
                (nbytes, storage.link_bytes, storage.link_dtype, storage.size, storage.stride)
            )
            nbytes += aligned(storage.link_bytes)
        link = group.link
        block = link.pool.allocate(nbytes)
        if block is None:
            self._warn_of_host_memory(group, nbytes)
            return False
        group.stream = stream = link.transfer.compute_stream()
        # Narrowed on the compute stream: on the transfer stream the kernels would wait for room
        # among compute's, and the copies behind them.
        sources = [
            upper_halves(storage.original()) if storage.narrow else storage.original()
            for storage in storages
        ]
        hosts = block.tensors(tuple(spans))
        for storage, host in zip(storages, hosts, strict=True):
            storage.host = host
        with _range("offload", group):
            fence = link.transfer.offload(
                list(zip(sources, hosts, strict=True)), stream=stream, after=block.fences
            )
        block.fences = (fence,)
        group.block = block
        group.copy = Copy(link.transfer, stream, fence, sources)
        group.move_to(GroupState.OFFLOADING)
        self._counters.offloaded_bytes += sum([storage.link_bytes for storage in storages])
        self._counters.offloaded_storages += len(storages)
        return True

    def release(self, group: Group) -> None:
        """Give up the device memory of an offloading group once compute is behind its copy.

        Does nothing in any other state: the group's backward may have begun.
        """
        with self._lock:
            if group.state is not GroupState.OFFLOADING or group.copy is None:
                return
            group.move_to(GroupState.OFFLOADED)
            group.copy.join()
            group.copy = None
            for storage in group.live_storages():
                for alias, version in storage.aliases or ():
                    if alias._version != version:
                        # The copy may be of the changed value, or of both.
                        self._keep_changed(group, storage)
                        break
                else:
                    self._counters.saved_bytes += storage.nbytes
                    storage.aliases = None
            self._counters.lose(group.device_bytes)

    def _keep_changed(self, group: Group, storage: SavedStorage) -> None:
        # It keeps its aliases, and so autograd's own behaviour: an error if, and only if, backward
        # needs a save that was changed after it.
        group.device_bytes -= storage.nbytes
        storage.host = ()
        self._counters.lose(storage.nbytes)
        self._counters.kept_bytes[KeepReason.CHANGED] += storage.nbytes

    def launch_reload(self, group: Group) -> None:
        """Launch the reload of an offloaded group ahead of its need, if there is memory for it.

        Does nothing in any other state.
        """
        with self._lock:
            if group.state is GroupState.OFFLOADED:
                # Early is a hint. The group is asked for again when its backward needs it, and
                # other backwards may have freed until then what it takes.
                with suppress(torch.OutOfMemoryError):
                    self._reload(group)

    def _reload(self, group: Group) -> None:
        block = group.block
        if block is None:
            raise group.impossible(asked="a reload without host bytes")
        storages = [storage for storage in group.live_storages() if storage.aliases is None]
        transfer = group.link.transfer
        device = transfer.device
        # The stream of the forward owns the memory, whichever thread prefetches: what backward
        # frees there is reused there, in order.
        with transfer.on(group.stream), _outliving():
            targets = [
                torch.empty_strided(
                    storage.size, storage.stride, dtype=storage.link_dtype, device=device
                )
                for storage in storages
            ]
        hosts = [storage.host for storage in storages]
        with _range("reload", group):
            fence = transfer.reload(
                list(zip(targets, hosts, strict=True)), stream=group.stream, after=block.fences
            )
        for storage, target in zip(storages, targets, strict=True):
            storage.reloaded = target
            storage.host = ()
        # The bytes may be given to another group at once: its copy is ordered behind this one.
        block.fences = (fence,)
        group.block = None
        group.copy = Copy(transfer, group.stream, fence, targets)
        group.move_to(GroupState.RELOADING)
        self._counters.reloaded_bytes += sum([storage.link_bytes for storage in storages])
        self._gain(group.device_bytes)

    def wait_reload(self, group: Group) -> None:
        """Order compute after the reload of a group; does nothing if none is in flight."""
        with self._lock:
            if group.state is GroupState.RELOADING and group.copy is not None:
                group.copy.join()
                # Widened on the compute stream: on the transfer stream, behind a copy, the kernels
                # would hold compute's up for many times as long as they run.
                with group.link.transfer.on(group.stream), _outliving():
                    for storage in group.live_storages():
                        if storage.narrow:
                            storage.widen()
                group.copy = None
                group.move_to(GroupState.RESIDENT)

    def begin_backward(self, group: Group) -> None:
        """Make a group ready for its first unpack, and prefetch the group that follows.

        The first unpack of a group is the only signal of its backward: no module or tensor hook
        is needed. What no prefetch has launched is reloaded here, at the price of a stall.
        """
        with self._lock:
            if not group.backward_pending or group.state is GroupState.RECORDING:
                # An attention that differentiates through itself unpacks what it still records.
                return
            if group.state is GroupState.OFFLOADING and group.copy is not None:
                # Backward came before the next attention's end. The data is still here: use it,
                # but compute may free it only behind the copy that reads it.
                self._counters.late_releases += 1
                group.copy.join()
                group.copy = None
                group.drop_host_bytes()
                group.move_to(GroupState.RESIDENT)
            if group.state is GroupState.OFFLOADED:
                self._counters.reload_misses += 1
                self._reload(group)
            # What this group needs comes first: a prefetch must not take its memory.
            self.wait_reload(group)
            known = group.previous
            for _ in range(self._ahead):
                following = None if known is None else known()
                if following is None:
                    break
                # Its copy runs beside the backward of the groups before it.
                self.launch_reload(following)
                known = following.previous
            group.backward_pending = False

    def forget(self, group: Group) -> None:
        """Take a group that nothing owns any more out of the count. Called from finalizers."""
        if group.state is not GroupState.OFFLOADED:
            self._forgotten.append(group.device_bytes)

    def stats(self) -> SwapStats:
        """Return the counters and the gauges of this moment."""
        with self._lock:
            # Held while they are counted: one that died in between would be taken off twice.
            groups = list(self._groups)
            self._forgotten.clear()
            # Counted anew: an interrupt between two lines may have left the running number off.
            self._counters.resident_bytes = sum(
                [g.device_bytes for g in groups if g.state is not GroupState.OFFLOADED]
            )
            return self._counters.snapshot(
                live_groups=len(self._groups),
                host_bytes_in_use=self._links.bytes_in_use,
                host_bytes_reserved=self._links.reserved_bytes,
            )

    def reset_stats(self) -> None:
        """Start the counters anew."""
        with self._lock:
            self._gain(0)
            self._counters = self._counters.anew()

    def close(self) -> None:
        """Give the pinned memory up; live graphs stay right."""
        with self._lock:
            # A forward that runs in another thread now finds no memory, and needs no warning.
            self._warned = True
            self._links.close()

    def _gain(self, nbytes: int) -> None:
        forgotten = self._forgotten
        while forgotten:
            self._counters.lose(forgotten.popleft())
        self._counters.gain(nbytes)

    def _warn_of_host_memory(self, group: Group, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            f"activation_swap: attention could not get pinned host memory for {group.fqn} "
            f"({nbytes} bytes): {group.link.pool.failure}. Its saved tensors stay on the device; "
            "training goes on. Free host memory, or set activation_swap: none.",
        )


def _outliving() -> Any:
    """Return a context in which tensors are made that any later backward may use, too."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _NO_CONTEXT


def _range(verb: str, group: Group) -> Any:
    """Return a profiler range, or an empty context when nobody records."""
    if not profiling():
        return _NO_CONTEXT
    return torch.profiler.record_function(f"activation_swap::{verb}({group.fqn})")
