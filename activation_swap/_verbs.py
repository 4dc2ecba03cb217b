# SPDX-License-Identifier: Apache-2.0
"""The verbs through which a pipeline scheduler tells a swap when a chunk moves."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

__all__ = ["GroupKey", "GroupVerbs", "IdleVerbs", "Keep"]


class GroupKey(NamedTuple):
    """Names one chunk: the forward of one microbatch through one stage.

    Attributes:
        stage: Index of the stage in the whole pipeline.
        microbatch: Index of the microbatch in the step.
    """

    stage: int
    microbatch: int


class Keep(StrEnum):
    """What of a chunk stays on the device after its forward."""

    NOTHING = "NOTHING"
    """All groups of the chunk move, one for each attention."""
    TAIL = "TAIL"
    """The last attention stays, because the backward of this chunk follows at once."""
    ALL = "ALL"
    """The whole chunk stays: the plan found that moving it would not lower the peak."""


class GroupVerbs(Protocol):
    """What ``Swap.groups`` offers to a pipeline scheduler.

    Every verb only launches copies or orders streams; none blocks the host. For one chunk they come
    in the order in which they stand here. When they come is a performance hint, and so are those of
    the reload: an unpack of a group that no verb has brought back waits for its offload, reloads it
    then and counts a ``reload_misses``. A verb that comes late, or not at all, costs time, never a
    bit; one whose chunk is in another state raises, and does nothing.
    """

    def set_group(self, key: tuple[int, int] | None, *, keep: Keep = Keep.NOTHING) -> None:
        """Name the chunk that attention forwards of the calling thread belong to.

        Args:
            key: ``(stage, microbatch)``, or ``None`` after the forward. Forwards outside any chunk
                pass through untouched. A key may be used again for the next step; the tensors of
                the last one belong to its graph.
            keep: What of the chunk stays on the device.

        Raises:
            RejectedError: ``key`` is no pair (AS512).
            SwapStateError: The chunk is named, and neither closed nor aborted (AS509).
        """

    def launch_offload(self, key: tuple[int, int]) -> None:
        """Close the chunk after its forward; the copies of all that moves have been launched.

        Raises:
            SwapStateError: The chunk is unknown, or was closed (AS509).
        """

    def wait_offload(self, key: tuple[int, int]) -> None:
        """Order compute after the chunk's last D2H and give up the rest of its device memory.

        Raises:
            SwapStateError: Its offload was not launched, or was waited for (AS509).
        """

    def launch_reload(self, key: tuple[int, int]) -> None:
        """Launch the H2D of the attention that backward needs first.

        The others follow by themselves, one attention ahead of the backward.

        Raises:
            SwapStateError: Its offload was not waited for, or it is reloading (AS509).
        """

    def wait_reload(self, key: tuple[int, int]) -> None:
        """Order compute after the H2D that :meth:`launch_reload` launched.

        Raises:
            SwapStateError: No reload was launched (AS509).
        """

    def abort(self, key: tuple[int, int] | None = None) -> None:
        """Forget the bookkeeping of one chunk, or of all, after a failed step.

        Live graphs stay right: their saved tensors belong to them, not to the chunk. Repeatable.

        Raises:
            RejectedError: ``key`` is neither ``None`` nor a pair (AS512).
        """


class IdleVerbs:
    """The verbs of a swap that moves nothing."""

    def set_group(self, key: tuple[int, int] | None, *, keep: Keep = Keep.NOTHING) -> None:
        """Do nothing."""

    def launch_offload(self, key: tuple[int, int]) -> None:
        """Do nothing."""

    def wait_offload(self, key: tuple[int, int]) -> None:
        """Do nothing."""

    def launch_reload(self, key: tuple[int, int]) -> None:
        """Do nothing."""

    def wait_reload(self, key: tuple[int, int]) -> None:
        """Do nothing."""

    def abort(self, key: tuple[int, int] | None = None) -> None:
        """Do nothing."""
