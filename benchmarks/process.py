"""One process of a run: builds the model once, measures its points, writes one JSON for each."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import facts
from benchmarks.model import build, cut
from benchmarks.step import Sgd, measure

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.runs import Point, Process, Run

__all__ = ["run_process"]


def run_process(
    name: str, run: Run, process: Process, *, device: str, out: Path, command: str
) -> None:
    """Measure every point of a process.

    Args:
        name: The run's.
        run: What to do; only ``process`` of it is done here.
        process: What to measure.
        device: ``cpu``, or an accelerator's.
        out: Folder for the results.
        command: What the user called, for the record.
    """
    if device == "cpu":
        # The harness is tried out there beside other work; nothing is timed for its own sake.
        torch.set_num_threads(1)
    machine = facts(device)
    layers = process.points[0].layers
    began = time.perf_counter()
    model = build(run.shape, device=device, layers=layers)
    built = time.perf_counter() - began
    optimizer = Sgd(model, lr=run.lr, update=run.update)
    for number, point in enumerate(process.points):
        if point.layers is not None and point.layers != len(model.model.layers):
            cut(model, point.layers)
        began = time.perf_counter()
        result = measure(process.mode, model, optimizer, point, run=run, device=device)
        record = {
            "run": name,
            "mode": process.mode,
            "repeat": process.repeat,
            "shape": run.shape,
            "point": asdict(replace(point, layers=len(model.model.layers))),
            "gpus": 1,
            "warmup": run.warmup,
            "steps": run.steps,
            "lr": run.lr,
            "deterministic": run.deterministic,
            **result,
            "machine": machine,
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "build_seconds": built,
            "seconds": time.perf_counter() - began,
        }
        path = out / f"{name}-{process.mode}-{process.repeat}-{number:02d}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(_line(record, point), flush=True)


def _line(record: dict[str, Any], point: Point) -> str:
    figures = record.get("figures")
    what = (
        f"{record['run']} {record['mode']} {point.tokens} tokens {record['point']['layers']} layers"
    )
    if point.policy:
        what += f" {dict(point.policy)}"
    if figures is None:
        return f"{what}: {record['outcome']}: {record['reason']} [{record['seconds']:.0f} s]"
    peak = figures["peak_bytes"]
    memory = "" if peak is None else f", peak {peak / 2**30:.2f} GiB"
    return (
        f"{what}: {figures['step_ms']:.1f} ms ({figures['step_ms_min']:.1f} to "
        f"{figures['step_ms_max']:.1f}), queued {figures['forward_queued_ms']:.0f} + "
        f"{figures['step_queued_ms'] - figures['forward_queued_ms']:.0f} ms{memory}, "
        f"first {figures['first_step_ms'] or 0:.0f} ms, digest {figures['gradient_digest'][:8]} "
        f"[{record['seconds']:.0f} s]"
    )
