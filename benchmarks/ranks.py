# SPDX-License-Identifier: Apache-2.0
"""What measurements by several ranks share: links, the machine, records that outlive a crash."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist

from activation_swap.trainer.link_probe import probe_link
from benchmarks.machine import describe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = [
    "Records",
    "add_rank_options",
    "agree",
    "describe_ranks",
    "free_memory",
    "gather",
    "set_up",
]

_Value = TypeVar("_Value")

_MARGIN_SECONDS: Final = 5.0


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add what every script of several ranks takes."""
    parser.add_argument("--name", required=True, help="name of the run in the records")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--command", default="", help="what the user called, for the records")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="seconds of the epoch: begin nothing then"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or another accelerator, or cpu")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a preset of the trainer")
    parser.add_argument("--layers", type=int, required=True, help="decoder layers of a rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--policy", type=json.loads, default={}, help="SwapPolicy fields as JSON")


def set_up(device: torch.device) -> None:
    """Set this process up to measure on a device."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    # Nothing here reads what it has not written, and all pinned memory would be written once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def gather(own: Any) -> list[Any]:
    """Return the value of every rank, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def agree(value: _Value) -> _Value:
    """Return the value of rank 0 on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def free_memory(device: torch.device) -> None:
    """Give back what the allocator caches."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


def describe_ranks(device: torch.device) -> dict[str, Any]:
    """Return the facts about the machine, with every rank's link: alone, and with all copying.

    The link rates that stand beside those of one GPU are rank 0's, alone.
    """
    alone = None
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            alone = probe_link(str(device))
    dist.barrier()
    together = probe_link(str(device), meet=dist.barrier)
    free_memory(device)
    machine = describe(device.type, alone)
    if alone is not None and together is not None:
        both = gather((asdict(alone), asdict(together)))
        machine["links"] = {
            "alone": [of_one for of_one, _ in both],
            "together": [of_all for _, of_all in both],
        }
    return machine


@dataclass(kw_only=True)
class Records:
    """The files of a launch, written by rank 0: one for each measurement.

    A file says that the measurement failed until its figures replace that. So whatever ends the
    processes leaves a record, and the same command goes on behind it.

    Attributes:
        out: The folder.
        common: What every record of the launch states.
        until: When to begin no more, in seconds of the epoch.
    """

    out: Path
    common: dict[str, Any]
    until: float
    _longest: float = 0.0

    @classmethod
    def of(cls, options: argparse.Namespace, machine: dict[str, Any], **more: Any) -> Records:
        """Make the records of a launch with the options of :func:`add_rank_options`."""
        common = {
            "run": options.name,
            "shape": options.shape,
            "gpus": dist.get_world_size(),
            "warmup": options.warmup,
            "steps": options.steps,
            "lr": 0.0,
            "deterministic": False,
            "repetitions": (
                f"{options.warmup} warm-up steps, the first under deterministic algorithms for the "
                f"digests of its gradients, and {options.steps} timed ones; the modes one after "
                "the other in the same processes; median, fastest and slowest of the slowest rank"
            ),
            "machine": machine,
            "command": options.command,
            **more,
        }
        return cls(out=options.out, common=common, until=options.until)

    def outcome(self, name: str) -> str | None:
        """Return how a measurement ended, ``None`` where it has not begun, on all ranks."""
        known: str | None = None
        if dist.get_rank() == 0 and self._path(name).exists():
            known = json.loads(self._path(name).read_text("utf-8"))["outcome"]
        return agree(known)

    def time_left(self) -> bool:
        """Whether another measurement as long as the longest so far would end in time."""
        return agree(time.time() + self._longest + _MARGIN_SECONDS < self.until)

    def write(self, name: str, facts: dict[str, Any], result: dict[str, Any]) -> None:
        """Write a record. Only the rank whose record it is calls this.

        Args:
            name: Of the file.
            facts: ``mode``, ``repeat`` and ``point``.
            result: ``outcome`` and ``figures``, or ``reason``.
        """
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record = {**self.common, **facts, **result, "date": date}
        part = self._path(name).with_suffix(f".{dist.get_rank()}")
        part.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        part.rename(self._path(name))

    @contextmanager
    def measurement(self, name: str, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Measure inside the block, which puts the figures into what it is given.

        A rank that runs out of memory says so and ends its process at once: the others wait for it
        in a collective, and torchrun ends them.
        """
        began = time.perf_counter()
        if dist.get_rank() == 0:
            ended = "its processes ended, or were ended, in the middle of it"
            self.write(name, facts, {"outcome": "failed", "reason": ended})
        dist.barrier()
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            where = f"CUDA out of memory on rank {dist.get_rank()}"
            self.write(name, facts, {"outcome": "out of memory", "reason": where})
            print(f"{name}: {where}", flush=True)
            os._exit(1)
        seconds = time.perf_counter() - began
        self._longest = max(self._longest, seconds)
        if dist.get_rank() == 0:
            self.write(name, facts, {"outcome": "measured", "figures": figures, "seconds": seconds})
            peak = figures["peak_bytes"]
            memory = "" if peak is None else f", peak {peak / 2**30:.2f} GiB"
            print(f"{name}: {figures['step_ms']:.1f} ms{memory} [{seconds:.0f} s]", flush=True)

    def _path(self, name: str) -> Path:
        return self.out / f"{name}.json"


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is one, or was caused by one: torch's pipelining raises its own from it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
