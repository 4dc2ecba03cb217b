# SPDX-License-Identifier: Apache-2.0
"""Two modes side by side, each in a process of its own, and the report of their comparison.

A baseline that runs twice tells whether gradients can be compared at all.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from activation_swap import Swap, SwapPolicy, registry
from activation_swap.trainer.device import (
    determinism,
    peak_device_bytes,
    reset_peak_device_bytes,
    synchronize,
)
from benchmarks.gradients import digest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["StepRecorder", "add_options", "compare", "run_steps", "train_step"]

_MODES = ("none", "none", "attention")


class StepRecorder:
    """Steps the optimizer of each parameter inside backward, frees its gradient, digests it.

    Args:
        parameters: By name.
        make_optimizer: Makes the optimizer of one parameter.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        make_optimizer: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    ) -> None:
        self.digests: dict[str, torch.Tensor] | None = None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(name, make_optimizer(parameter))
            )

    def _hook(self, name: str, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
        def step(parameter: torch.nn.Parameter) -> None:
            if self.digests is not None:
                gradient: Any = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                self.digests[name] = torch.hash_tensor(local)
            optimizer.step()
            parameter.grad = None

        return step


def add_options(parser: argparse.ArgumentParser, *, layers: int) -> None:
    """Add what both scripts take."""
    parser.add_argument("--mode", choices=("none", "attention"), help="one mode, in this process")
    parser.add_argument("--device", default="cuda", help="cuda, or another accelerator, or cpu")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a preset of the trainer")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the report")


def run_steps(
    mode: str,
    model: Any,
    base: Any,
    recorder: StepRecorder,
    *,
    options: argparse.Namespace,
    device: torch.device,
    seed: int = 1,
) -> dict[str, Any]:
    """Train, and return the figures.

    Args:
        mode: ``none`` or ``attention``.
        model: What is called.
        base: What ``registry.apply`` takes: ``model``, or the model inside of it.
        recorder: Of the model's gradients.
        options: See :func:`add_options`.
        device: Where the model is.
        seed: Of the tokens.
    """
    policy = SwapPolicy(**getattr(options, "policy", {}))
    swap = Swap() if mode == "none" else registry.apply(mode, base, policy=policy)
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, options.tokens)
    tokens = torch.randint(base.config.vocab_size, shape, device=device, generator=generator)
    losses, times = [], []
    for number in range(options.warmup + options.steps):
        if number == options.warmup:
            reset_peak_device_bytes(device)
            swap.reset_stats()
        synchronize(device)
        began = time.perf_counter()
        losses.append(train_step(model, tokens))
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    peak, stats = peak_device_bytes(device), swap.stats()
    recorder.digests = {}
    with determinism(enabled=True):
        losses.append(train_step(model, tokens))
    gradients, recorder.digests = recorder.digests, None
    swap.remove()
    timed = times[options.warmup :]
    return {
        "mode": mode,
        "step_ms": statistics.median(timed),
        "step_ms_min": min(timed),
        "step_ms_max": max(timed),
        "step_ms_all": timed,
        "peak_bytes": peak,
        "losses": [float(loss) for loss in losses],
        "gradients": len(gradients),
        "gradient_digest": digest(gradients),
        "saved_bytes": stats.saved_bytes // options.steps,
        "offloaded_bytes": stats.offloaded_bytes // options.steps,
        "reloaded_bytes": stats.reloaded_bytes // options.steps,
        "reload_misses": stats.reload_misses,
        "late_releases": stats.late_releases,
        "host_bytes_reserved": stats.host_bytes_reserved,
        "kept_bytes": {
            reason.value: nbytes // options.steps for reason, nbytes in stats.kept_bytes.items()
        },
    }


def train_step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Train on a batch, and return its loss."""
    loss: Any = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    detached: torch.Tensor = loss.detach()
    return detached


def compare(module: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run ``python -m module`` in each mode, print and write the report.

    Args:
        module: Its ``--mode`` prints one line of JSON.
        options: See :func:`add_options`.
        more: Names of the module's own options.
    """
    names = ("device", "shape", "layers", "tokens", "steps", "warmup", *more)
    arguments = [f"--{name}={getattr(options, name)}" for name in names]
    rows = []
    for mode in _MODES:
        command = [sys.executable, "-W", "ignore", "-m", module, f"--mode={mode}", *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    none, again, attention = rows
    repeats = none["gradient_digest"] == again["gradient_digest"]
    report = {
        "run": module.rpartition(".")[2],
        "command": f"python -m {module} {' '.join(arguments)}",
        "step_time_ratio": attention["step_ms"] / min(none["step_ms"], again["step_ms"]),
        "freed_of_eligible": None,
        "baseline_repeats_itself": repeats,
        "gradients_equal": none["gradient_digest"] == attention["gradient_digest"],
        "losses_equal": none["losses"] == attention["losses"],
        "rows": rows,
    }
    if none["peak_bytes"] is not None:
        freed = none["peak_bytes"] - attention["peak_bytes"]
        report["freed_of_eligible"] = freed / attention["saved_bytes"]
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(f"{text}\n", "utf-8")
    return report
