# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline on one GPU, driven through the verbs in a rank's 1F1B order.

``python -m benchmarks.stage`` runs 24 layers of the 30B shape as stage 0 of 4 with 8 microbatches,
4 of them in flight, once without and once with the swap, each in a process of its own, and prints
what the simulation predicted beside what was measured. ``python -m benchmarks render`` takes the
report in under a name such as ``pipeline-stage-4096.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.core.schedule.actions import Action, Kind
from activation_swap.core.schedule.decision import decide
from activation_swap.core.schedule.liveness import find_chunks
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.orders import one_f_one_b_order
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.core.schedule.simulation import in_flight, residency
from activation_swap.trainer.device import (
    determinism,
    peak_device_bytes,
    reset_peak_device_bytes,
    synchronize,
)
from benchmarks.gradients import GradientSink
from benchmarks.machine import facts
from benchmarks.model import build, trainable

SHAPE = "qwen3-30b-a3b"
STAGES = 4
BYTES_PER_TOKEN = 50_176
"""Unique bytes that one attention of the 30B shape saves in bf16 with SDPA."""


def predicted_bytes(*, layers: int, microbatches: int, tokens: int) -> int:
    """Return what the simulation says the peak of stage 0 falls by."""
    order = one_f_one_b_order(stage=0, stages=STAGES, microbatches=microbatches)
    chunks = find_chunks(order)
    attentions = {0: layers}
    keeps = decide(chunks, attentions=attentions, steps=len(order))
    without = in_flight(chunks, weights=attentions, steps=len(order))
    planned = residency(chunks, keeps, attentions=attentions, steps=len(order))
    return (max(without) - max(planned)) * tokens * BYTES_PER_TOKEN


def measure(  # noqa: C901 - one stage's step, read from top to bottom
    mode: str,
    *,
    tokens: int,
    layers: int,
    microbatches: int,
    steps: int,
    warmup: int,
    device: str,
    shape: str = SHAPE,
    policy: SwapPolicy | None = None,
) -> dict[str, Any]:
    """Run the stage's order and return its figures."""
    here = torch.device(device)
    model = build(shape, device=device, layers=layers)
    gradients = GradientSink(dict(trainable(model)))
    order = one_f_one_b_order(stage=0, stages=STAGES, microbatches=microbatches)
    swap = runner = plan = None
    if mode == "attention":
        swap = registry.apply(
            "attention", model, setup=TrainingSetup(pp_size=STAGES), policy=policy or SwapPolicy()
        )
        runner = ScheduleRunner(swap.groups)
        plan = plan_rank(order, attentions={0: layers})
    generator = torch.Generator(device).manual_seed(1)
    config, sizes = model.config, (microbatches, tokens)
    inputs = torch.randint(config.vocab_size, sizes, device=device, generator=generator)
    like_outputs = (1, tokens, config.hidden_size)
    gradient = torch.randn(like_outputs, device=device, dtype=model.dtype, generator=generator)
    outputs: dict[int, torch.Tensor] = {}

    def compute(action: Action) -> None:
        if action.kind is Kind.FORWARD:
            batch = inputs[action.microbatch : action.microbatch + 1]
            outputs[action.microbatch] = model.model(
                input_ids=batch, use_cache=False
            ).last_hidden_state
        else:
            torch.autograd.backward(outputs.pop(action.microbatch), gradient)

    def step() -> None:
        if runner is not None:
            runner.begin_step(plan)
        for scheduled in order:
            for action in scheduled.members:
                if runner is None:
                    compute(action)
                else:
                    with runner.compute(action):
                        compute(action)

    times = []
    for number in range(warmup + steps):
        if number == warmup:
            reset_peak_device_bytes(here)
            if swap is not None:
                swap.reset_stats()
        synchronize(here)
        began = time.perf_counter()
        step()
        synchronize(here)
        if number >= warmup:
            times.append((time.perf_counter() - began) * 1e3)
    peak = peak_device_bytes(here)
    stats = None if swap is None else swap.stats()
    gradients.begin()
    with determinism(enabled=True):
        step()
    digest, _ = gradients.finish()
    return {
        "mode": mode,
        "tokens": tokens,
        "layers": layers,
        "microbatches": microbatches,
        "step_ms": statistics.median(times),
        "step_ms_min": min(times),
        "step_ms_max": max(times),
        "peak_bytes": peak,
        "gradient_digest": digest,
        "groups_kept": None if plan is None else sum("ALL" in str(item) for item in plan),
        "offloaded_bytes": 0 if stats is None else stats.offloaded_bytes // steps,
        "reloaded_bytes": 0 if stats is None else stats.reloaded_bytes // steps,
        "reload_misses": 0 if stats is None else stats.reload_misses,
        "late_releases": 0 if stats is None else stats.late_releases,
        "host_bytes_reserved": 0 if stats is None else stats.host_bytes_reserved,
        "machine": facts(device),
    }


def main() -> None:
    """Measure both modes and print their figures and the prediction as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("none", "attention"), help="one mode, in this process")
    parser.add_argument("--device", default="cuda", help="cuda, or another accelerator")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    arguments = vars(parser.parse_args())
    mode = arguments.pop("mode")
    if mode is not None:
        print(json.dumps(measure(mode, **arguments)))
        return
    options = [f"--{name}={value}" for name, value in arguments.items()]
    rows = []
    for each in ("none", "attention"):
        command = [sys.executable, "-m", "benchmarks.stage", f"--mode={each}", *options]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
        rows.append(json.loads(output.splitlines()[-1]))
    shape = {key: arguments[key] for key in ("layers", "microbatches", "tokens")}
    predicted = predicted_bytes(**shape)
    rows[1]["predicted_bytes"] = predicted
    freed = rows[0]["peak_bytes"] - rows[1]["peak_bytes"]
    report = {
        "run": "pipeline-stage",
        "command": f"python -m benchmarks.stage {' '.join(options)}",
        "shape": SHAPE,
        "optimizer": "none: gradients are freed inside backward",
        "rows": rows,
        "predicted_bytes": predicted,
        "freed_bytes": freed,
        "freed_of_predicted": freed / predicted if predicted else None,
        "step_time_ratio": rows[1]["step_ms"] / rows[0]["step_ms"],
        "gradients_equal": rows[0]["gradient_digest"] == rows[1]["gradient_digest"],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
