# SPDX-License-Identifier: Apache-2.0
"""Verbs that write down what they were told, and by which thread."""

from __future__ import annotations

import threading

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Action, Kind

__all__ = ["RecordingVerbs"]


class RecordingVerbs:
    """Implements ``GroupVerbs``; ``log`` reads like a lowered schedule."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.aborts = 0
        self.group_by_thread: dict[int, tuple[int, int] | None] = {}

    def set_group(self, key: tuple[int, int] | None, *, keep: Keep = Keep.NOTHING) -> None:
        self.group_by_thread[threading.get_ident()] = key
        if key is not None:
            self.log.append(str(Action(key[0], Kind.SET_GROUP, key[1], keep)))

    def launch_offload(self, key: tuple[int, int]) -> None:
        self._write(Kind.OFFLOAD, key)

    def wait_offload(self, key: tuple[int, int]) -> None:
        self._write(Kind.WAIT_OFFLOAD, key)

    def launch_reload(self, key: tuple[int, int]) -> None:
        self._write(Kind.RELOAD, key)

    def wait_reload(self, key: tuple[int, int]) -> None:
        self._write(Kind.WAIT_RELOAD, key)

    def abort(self, key: tuple[int, int] | None = None) -> None:
        assert key is None
        self.aborts += 1

    @property
    def current(self) -> tuple[int, int] | None:
        """The group of the calling thread."""
        return self.group_by_thread.get(threading.get_ident())

    def take(self) -> str:
        """Return the log and start a new one."""
        text = " ".join(self.log)
        self.log.clear()
        return text

    def _write(self, kind: Kind, key: tuple[int, int]) -> None:
        self.log.append(str(Action(key[0], kind, key[1])))
