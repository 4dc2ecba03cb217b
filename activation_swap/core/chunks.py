# SPDX-License-Identifier: Apache-2.0
"""The order under a pipeline: by (stage, microbatch) chunks, which a scheduler moves."""

from __future__ import annotations

import threading
from enum import Enum, auto
from operator import index
from typing import TYPE_CHECKING
from weakref import ref

from activation_swap._stats import KeepReason
from activation_swap._verbs import GroupKey, Keep
from activation_swap.core.group import GroupState
from activation_swap.core.nothing_moved import NothingMoved
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from activation_swap.core.engine import Engine
    from activation_swap.core.group import Group
    from activation_swap.core.hooked_site import HookedSite
    from activation_swap.errors import ActivationSwapError

__all__ = ["Chunks"]


class ChunkState(Enum):
    """How far the verbs of one chunk have come."""

    RECORDING = auto()
    """``set_group`` named it; its forward runs or has run."""
    OFFLOADING = auto()
    """``launch_offload`` closed it."""
    OFFLOADED = auto()
    """``wait_offload`` gave its device memory up."""
    RELOADING = auto()
    """``launch_reload`` brought back what backward needs first."""
    RELOADED = auto()
    """``wait_reload`` ordered compute after that."""


_BEFORE = {
    "launch_offload": (ChunkState.RECORDING,),
    "wait_offload": (ChunkState.OFFLOADING,),
    "launch_reload": (ChunkState.OFFLOADED,),
    "wait_reload": (ChunkState.RELOADING,),
}
"""The states in which each verb is legal."""


_CLOSED = frozenset({ChunkState.OFFLOADED, ChunkState.RELOADING, ChunkState.RELOADED})
"""The states in which the verbs that a graph without any use still needs have come."""

_MANY = 1024
"""Chunks that are known before those that are through are forgotten."""


class _Chunk:
    """One forward of one microbatch through one stage. Groups are known weakly: graphs own them."""

    __slots__ = ("groups", "keep", "key", "state")

    def __init__(self, key: GroupKey, keep: Keep) -> None:
        self.key = key
        self.keep = keep
        self.state = ChunkState.RECORDING
        self.groups: list[ref[Group]] = []

    def through(self) -> bool:
        """Whether its graph is gone, and no verb of it is to come."""
        if any(known() is not None for known in self.groups):
            return False
        if not self.groups:
            # It moves nothing; or its forward has yet to come to an attention.
            return self.state is ChunkState.RELOADED
        return self.keep is Keep.ALL or self.state in _CLOSED

    def last_group(self) -> Group | None:
        """Return the group of the chunk's latest attention call, if it is alive."""
        return self.groups[-1]() if self.groups else None


class _Current(threading.local):
    """The chunk that this thread's forward belongs to: overlapped schedules run two threads."""

    chunk: _Chunk | None = None


class Chunks:
    """The verbs of ``Swap.groups``, and the order in which the groups of a chunk move.

    Inside a chunk it goes layer by layer, as without pipeline: the end of an attention launches
    its offload and releases the one before, the first unpack of an attention launches the reload of
    the one before. So neither its forward nor its backward holds all its layers. The verbs do what
    only the schedule knows: when the last of them can be released, and when backward will come.

    Implements :class:`~activation_swap._verbs.GroupVerbs` and
    :class:`~activation_swap.core.order.SwapOrder`.
    """

    def __init__(self, engine: Engine, sites: Sequence[HookedSite]) -> None:
        self._engine = engine
        # With the tail kept, the stage's last attention needs no copy at all.
        last = {site.stage: index for index, site in enumerate(sites)}
        self._tails = frozenset(last.values())
        self._sites = sites
        # Reentrant: a signal handler may remove the swap between two lines of a verb.
        self._lock = threading.RLock()
        self._current = _Current()
        self._chunks: dict[GroupKey, _Chunk] = {}
        self._purge_at = _MANY
        self._driven = False
        self._nothing_moved = NothingMoved(engine)
        self._moved = False

    def drive(self) -> None:
        """Note that a schedule will name the chunks: forwards outside of them are legal now."""
        self._driven = True

    def set_group(self, key: tuple[int, int] | None, *, keep: Keep = Keep.NOTHING) -> None:
        """Name the chunk of this thread's attention forwards from here on.

        A key may be used again for the next step; the tensors of the last one belong to its graph.

        Args:
            key: ``(stage, microbatch)``, or ``None`` to leave the chunk.
            keep: What of it stays on the device.

        Raises:
            RejectedError: ``key`` is no pair of indices, or ``keep`` is no ``Keep``.
            SwapStateError: The chunk is named, and neither closed nor aborted.
        """
        chunk = None if key is None else _Chunk(*_read(key, keep))
        self._driven = True
        if chunk is None:
            self._current.chunk = None
            return
        with self._lock:
            known = self._chunks.get(chunk.key)
            # A chunk that stays whole has nothing to launch, and so nothing that closes it.
            if (
                known is not None
                and known.state is ChunkState.RECORDING
                and known.keep is not Keep.ALL
            ):
                raise _illegal(verb="set_group", key=chunk.key, state=known.state)
            if len(self._chunks) >= self._purge_at:
                self._purge()
            self._chunks[chunk.key] = chunk
        self._current.chunk = chunk

    def launch_offload(self, key: tuple[int, int]) -> None:
        """Close a chunk after its forward. The copies run since each attention's end.

        Raises:
            SwapStateError: The chunk is unknown, or was closed.
        """
        chunk = self._step(key, "launch_offload", ChunkState.OFFLOADING)
        # Once something did move, a chunk in which nothing does is a short one.
        if not self._moved and chunk.keep is not Keep.ALL:
            self._nothing_moved.warn()

    def wait_offload(self, key: tuple[int, int]) -> None:
        """Order compute after the chunk's last copy and give up its device memory.

        Raises:
            SwapStateError: Its offload was not launched, or was waited for.
        """
        chunk = self._step(key, "wait_offload", ChunkState.OFFLOADED)
        for known in chunk.groups:
            group = known()
            if group is not None:
                self._engine.release(group)

    def launch_reload(self, key: tuple[int, int]) -> None:
        """Launch the reload of the attention that backward needs first.

        Raises:
            SwapStateError: Its offload was not waited for, or it is reloading.
        """
        group = self._step(key, "launch_reload", ChunkState.RELOADING).last_group()
        if group is not None:
            self._engine.launch_reload(group)

    def wait_reload(self, key: tuple[int, int]) -> None:
        """Order compute after the reload that ``launch_reload`` launched.

        Raises:
            SwapStateError: No reload was launched.
        """
        group = self._step(key, "wait_reload", ChunkState.RELOADED).last_group()
        if group is not None:
            self._engine.wait_reload(group)

    def abort(self, key: tuple[int, int] | None = None) -> None:
        """Forget one chunk, or all, after a failure. Their graphs stay right. Repeatable.

        Args:
            key: The chunk, or ``None`` for all of this swap.
        """
        named = None if key is None else _read(key)[0]
        with self._lock:
            if named is None:
                self._chunks.clear()
            else:
                self._chunks.pop(named, None)
        chunk = self._current.chunk
        if chunk is not None and named in {None, chunk.key}:
            self._current.chunk = None

    def admit(self, index: int) -> bool:
        """Record an attention call into this thread's chunk; pass it by where there is none.

        Raises:
            RejectedError: No schedule was attached and no verb was used.
        """
        if self._current.chunk is not None:
            return True
        if not self._driven:
            raise Reason.SCHEDULE_NOT_ATTACHED.error(
                where=self._sites[index].fqn, found="a training forward without any chunk"
            )
        return False

    def previous(self) -> Group | None:
        """Return the group of the chunk's attention call before, if it is alive."""
        chunk = self._current.chunk
        return None if chunk is None else chunk.last_group()

    def keep(self, group: Group) -> KeepReason | None:
        """Keep what the plan leaves on the device."""
        chunk = self._current.chunk
        if chunk is None or chunk.keep is Keep.ALL:
            return KeepReason.SCHEDULE
        if chunk.keep is Keep.TAIL and group.index in self._tails:
            return KeepReason.LAST
        return None

    def sealed(self, group: Group) -> None:
        """Release the group before this one of the same chunk, behind its copy."""
        chunk = self._current.chunk
        if chunk is None:
            return
        before = chunk.last_group()
        if before is not None:
            self._engine.release(before)
        if group.state is GroupState.OFFLOADING:
            self._moved = True
        if group.storages:
            # A group without any is gone at once: the next one continues from the one before.
            chunk.groups.append(ref(group))

    def _purge(self) -> None:
        """Forget the chunks that are through: a scheduler may never use a key again."""
        self._chunks = {key: chunk for key, chunk in self._chunks.items() if not chunk.through()}
        self._purge_at = max(_MANY, 2 * len(self._chunks))

    def _step(self, key: tuple[int, int], verb: str, state: ChunkState) -> _Chunk:
        named, _ = _read(key)
        with self._lock:
            chunk = self._chunks.get(named)
            if chunk is None or chunk.state not in _BEFORE[verb]:
                state_now = None if chunk is None else chunk.state
                raise _illegal(verb=verb, key=named, state=state_now)
            chunk.state = state
        return chunk


def _read(key: tuple[int, int], keep: Keep = Keep.NOTHING) -> tuple[GroupKey, Keep]:
    """Read the arguments of a verb: a ``Keep`` may be its text, as in a plan."""
    try:
        stage, microbatch = map(index, key)
        if min(stage, microbatch) >= 0:
            return GroupKey(stage, microbatch), Keep(keep)
    except (TypeError, ValueError):
        pass
    raise Reason.NOT_A_CHUNK.error(found=f"{key!r}, {keep!r}")


def _illegal(*, verb: str, key: GroupKey, state: ChunkState | None) -> ActivationSwapError:
    return Reason.GROUP_STATE.error(
        where=f"stage {key.stage}, microbatch {key.microbatch}",
        found=f"{verb} of a chunk that is {'unknown' if state is None else state.name}",
    )
