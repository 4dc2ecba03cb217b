# SPDX-License-Identifier: Apache-2.0
"""Files that are complete or not there, whatever ends the process."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from activation_swap.trainer.broke_off import broke_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["replace_files", "sync", "writing"]


def replace_files(directory: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write files, and only when all of them are on the disk give them their names.

    Args:
        directory: Where to.
        writers: By name of the file, what writes it to the path that it is given.

    Raises:
        SwapStateError: AS417 when one cannot be written; the files that were there before are
            as they were.
    """
    fresh = {directory / name: directory / f".{name}.unfinished" for name in writers}
    try:
        for path, unfinished in fresh.items():
            with writing(path):
                writers[path.name](unfinished)
                sync(unfinished)
        for path, unfinished in fresh.items():
            with writing(path):
                unfinished.replace(path)
        with writing(directory):
            sync(directory)
    finally:
        for unfinished in fresh.values():
            with suppress(OSError):
                unfinished.unlink()


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full or broken disk raises inside of the block into AS417.

    Args:
        path: What the block writes.

    Raises:
        SwapStateError: AS417.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise broke_off(error, where=path) from error
