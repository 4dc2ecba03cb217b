# SPDX-License-Identifier: Apache-2.0
"""Real processes that talk through gloo."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["run_ranks"]

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=120)


def run_ranks(function: Callable[[], T], *, size: int, directory: Path) -> list[T]:
    """Call a function on every rank of a group of new processes.

    Args:
        function: Module-level, or a partial of such; its result must pickle.
        size: Number of ranks.
        directory: Where the processes find each other; new for each group.

    Returns:
        The results, by rank.
    """
    with ProcessPoolExecutor(max_workers=size, mp_context=get_context("spawn")) as pool:
        rendezvous = f"file://{directory / 'rendezvous'}"
        futures = [pool.submit(_on_rank, function, r, size, rendezvous) for r in range(size)]
        errors = [error for future in futures if (error := future.exception(timeout=600))]
        if errors:
            # Together: when one rank fails, its peers report a closed connection.
            message = f"{len(errors)} of {size} ranks failed"
            raise BaseExceptionGroup(message, errors)
        return [future.result() for future in futures]


def _on_rank(function: Callable[[], T], rank: int, size: int, rendezvous: str) -> T:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    try:
        return function()
    finally:
        dist.destroy_process_group()
