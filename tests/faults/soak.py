# SPDX-License-Identifier: Apache-2.0
"""Thousands of steps with and without swap: equal losses, and nothing that grows.

python -m tests.faults.soak                     2,000 steps of a very tiny model on a CPU
python -m tests.faults.soak --minutes 10        as long on the accelerator, in both modes
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from activation_swap import Swap, SwapPolicy, registry
from tests.models import MID, VERY_TINY, build, forward, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LENGTHS = (7, 3, 12, 2, 9)
MOST_STEPS = 1_000_000


@dataclass
class Gauges:
    """What must not grow, sampled along a run."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def sample(self, model: Any, swap: Swap | None) -> None:
        """Read every gauge, between two steps."""
        gc.collect()
        stats = (swap or Swap()).stats()
        now = {
            "resident MiB": psutil.Process().memory_info().rss / MIB,
            "Python objects": len(gc.get_objects()),
            "pinned MiB": stats.host_bytes_reserved / MIB,
            "live groups": stats.live_groups,
            "hooks": sum(
                len(module._forward_hooks) + len(module._forward_pre_hooks)
                for module in model.modules()
            ),
        }
        if model.device.type != "cpu":
            now["device MiB"] = torch.accelerator.memory_allocated(model.device) / MIB
        for name, value in now.items():
            self.samples.setdefault(name, []).append(value)

    def growth(self, name: str) -> float:
        """Return by how much the last quarter's mean is above the second quarter's."""
        values = self.samples[name]
        quarter = max(1, len(values) // 4)
        early, late = values[quarter : 2 * quarter], values[-quarter:]
        return sum(late) / len(late) - sum(early) / len(early)


ALLOWED = {
    "resident MiB": 4.0,
    "Python objects": 50.0,
    "pinned MiB": 0.0,
    "live groups": 0.0,
    "hooks": 0.0,
    "device MiB": 1.0,
}
"""Growth between the second and the last quarter of a run. Resident memory is the allocator's."""


def train(model: Any, lengths: tuple[int, ...], gauges: Gauges, swap: Swap | None) -> Iterator[Any]:
    """Yield the loss of each step; the optimizer moves the weights, so that errors add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    number = 0
    while True:
        if number % 50 == 0:
            gauges.sample(model, swap)
        ids = tokens(model, length=lengths[number % len(lengths)], seed=number % 977)
        loss = forward(model, ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 97 == 0:
            # Graphs that nobody uses, and evaluation, belong to a life.
            forward(model, ids)
            with torch.no_grad():
                forward(model, ids)
        number += 1
        yield loss.detach()


def soak(*, steps: int, seconds: float, device: torch.device) -> list[str]:
    """Run both modes; return what went wrong.

    Args:
        steps: Number of steps, or 0 for as many as fit in ``seconds``.
        seconds: Time of both modes together.
        device: Where to train.
    """
    lengths = LENGTHS if device.type == "cpu" else (2048, 1024, 1536)
    options: dict[str, Any] = {"device": device, "attention": "sdpa"}
    if device.type != "cpu":
        options |= {"dtype": torch.bfloat16}
    shape = VERY_TINY if device.type == "cpu" else MID
    policy = SwapPolicy(min_bytes=1, slab_bytes=64 * 1024) if device.type == "cpu" else SwapPolicy()
    losses: dict[str, torch.Tensor] = {}
    problems = []
    for mode in ("none", "attention"):
        model = build(shape, **options)
        swap = registry.apply(mode, model, policy=policy)
        gauges = Gauges()
        # Written on the device, and not read before the end: reading would wait for the device.
        losses[mode] = torch.full((steps or MOST_STEPS,), torch.nan, device=device)
        start = time.monotonic()
        for done, loss in enumerate(train(model, lengths, gauges, swap), start=1):
            losses[mode][done - 1] = loss
            if mode == "none" and steps == 0 and time.monotonic() - start > seconds / 2:
                steps = done
            if done == steps:
                break
        elapsed = time.monotonic() - start
        print(f"{mode}: {steps} steps in {elapsed:.0f} s, {swap.stats()}")
        for name, values in gauges.samples.items():
            print(f"  {name:<16}{values[0]:>14,.1f} first {values[-1]:>14,.1f} last", end="")
            print(f"{gauges.growth(name):>12,.2f} growth")
            if gauges.growth(name) > ALLOWED[name]:
                problems.append(f"{mode}: {name} grew by {gauges.growth(name):.2f}")
        if mode == "attention" and swap.stats().offloaded_bytes == 0:
            problems.append("nothing moved")
        swap.remove()
        del model, swap
    different = int((losses["none"][:steps] != losses["attention"][:steps]).sum())
    print(f"losses that differ: {different} of {steps}")
    if different:
        problems.append(f"{different} losses differ")
    return problems


def main() -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("error", RuntimeWarning)
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - no other way
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if arguments.minutes is not None:
        found = torch.accelerator.current_accelerator()
        if found is None:
            parser.error("--minutes needs an accelerator")
        device = torch.device(found.type, 0)
    seconds = 60 * (arguments.minutes or 0)
    steps = 0 if arguments.minutes else arguments.steps
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        problems = soak(steps=steps, seconds=seconds, device=device)
    print(*(problems or ["nothing grew; losses are equal"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
