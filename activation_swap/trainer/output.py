# SPDX-License-Identifier: Apache-2.0
"""The directory of everything that a run writes."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from typing import TYPE_CHECKING, Self

from activation_swap.errors import Reason
from activation_swap.trainer.checkpoint import CheckpointStore
from activation_swap.trainer.disk import replace_files, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from activation_swap.errors import ActivationSwapError

__all__ = ["OutputDirectory"]

_REPORT = ("report.json", "report.md", "report.png")


class OutputDirectory:
    """Takes the directory for one run before the model is built: hours later it can still write.

    The directory is this run's until the ``with`` block, or the process, ends. The lock is on the
    file ``.lock``, which stays: a lock on a file that another process deletes protects nothing.

    Args:
        path: The directory; it is made.

    Attributes:
        checkpoints: Directory of the checkpoints.
        metrics: The metrics file.

    Raises:
        RejectedError: AS415 when a run could not write there, AS418 when another one does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise _unwritable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
        except BlockingIOError as error:
            os.close(self._lock)
            raise Reason.OUTPUT_IN_USE.error(
                found="a lock on .lock that another run holds", where=str(path)
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise _unwritable(error) from error

    def __enter__(self) -> Self:
        """Return this directory."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the directory to others."""
        os.close(self._lock)

    def refuse_earlier_run(self, *, resumable: bool) -> None:
        """Refuse to begin a run where the results of another one are.

        Args:
            resumable: Whether the command could be told to resume.

        Raises:
            RejectedError: AS408 when there is a checkpoint, or anything in the metrics.
        """
        checkpoints = CheckpointStore(self.checkpoints, keep=1).complete()
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        if not (checkpoints or lines):
            return
        fix = "set another output"
        if resumable and checkpoints:
            fix += ", or pass --resume to go on from the newest checkpoint"
        elif resumable:
            fix += ", or pass --resume to start anew and keep these metrics beside the new ones"
        raise Reason.EARLIER_RUN_IN_THE_WAY.error(
            found=f"{len(checkpoints)} checkpoints, metrics of {len(lines)} lines",
            where=str(self._path),
            fix=fix,
        )

    def replace_report(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """Put a report in the place of an earlier one: all of its files, or none.

        Args:
            writers: As of :func:`replace_files`. A file of an earlier report that is not among
                them is deleted.

        Raises:
            SwapStateError: AS417 when a file cannot be written.
        """
        replace_files(self._path, writers)
        for name in _REPORT:
            if name not in writers:
                with writing(self._path / name):
                    (self._path / name).unlink(missing_ok=True)

    def _probe(self) -> None:
        """Do now what would otherwise fail later."""
        for name in (*_REPORT, self.metrics.name):
            path = self._path / name
            if path.exists() and not path.is_file():
                raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
        directories = [self._path, self.checkpoints] if self.checkpoints.exists() else [self._path]
        for directory in directories:
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())


def _unwritable(error: Exception) -> ActivationSwapError:
    return Reason.OUTPUT_UNWRITABLE.error(found=f"{type(error).__name__}: {error}", where="output")
