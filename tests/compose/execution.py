# SPDX-License-Identifier: Apache-2.0
"""Runs combinations, those of several processes together in one group of processes."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from tests.compose.combination import Result, Verdict, execute, merge
from tests.compose.table import COMBINATIONS
from tests.pipeline.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run_all"]


def run_all(keys: Sequence[str], *, ranks: int) -> dict[str, Result]:
    """Check combinations.

    Args:
        keys: Their names.
        ranks: How many processes all of them take. One is a new process, too: some of the tools
            keep state for the life of a process. It has no process group.

    Returns:
        Their results, by name.
    """
    run = partial(_run, tuple(keys))
    if ranks == 1:
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            per_rank = [pool.submit(run).result()]
    else:
        with TemporaryDirectory() as directory:
            per_rank = run_ranks(run, size=ranks, directory=Path(directory))
    return {key: merge([results[key] for results in per_rank]) for key in keys}


def _run(keys: tuple[str, ...]) -> dict[str, Result]:
    torch.set_num_threads(1)
    results = {}
    for key in keys:
        results[key] = result = execute(COMBINATIONS[key])
        if result.verdict is Verdict.FAILED:
            # At once: other ranks may now wait for this one.
            sys.stderr.write(f"{key}: {result.detail}\n")
    return results
