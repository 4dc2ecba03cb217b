# SPDX-License-Identifier: Apache-2.0
"""One process of a run: builds the model once, measures its points, writes one JSON for each."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import facts
from benchmarks.model import build, cut
from benchmarks.records import result_path, write_record
from benchmarks.step import Sgd, measure

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.runs import Run

__all__ = ["run_process"]


def run_process(name: str, run: Run, number: int, *, device: str, out: Path, command: str) -> None:
    """Measure every point of a process.

    Args:
        name: The run's.
        run: What to do; only process ``number`` of it is done here.
        number: Of the process.
        device: ``cpu``, or an accelerator's.
        out: Folder for the results.
        command: What the user called, for the record.
    """
    if device == "cpu":
        # The harness is tried out there beside other work; nothing is timed for its own sake.
        torch.set_num_threads(1)
    process = run.processes[number]
    machine = facts(device)
    began = time.perf_counter()
    model = build(run.shape, device=device, layers=process.points[0].layers)
    built = time.perf_counter() - began
    optimizer = Sgd(model, lr=run.lr, update=run.update)
    for position, point in enumerate(process.points):
        if point.layers is not None and point.layers != len(model.model.layers):
            cut(model, point.layers)
        began = time.perf_counter()
        result = measure(process.mode, model, optimizer, point, run=run, device=device)
        result |= {"build_seconds": built, "seconds": time.perf_counter() - began}
        record = write_record(
            result_path(out, name, run, number, position),
            name,
            run,
            number=number,
            point=replace(point, layers=len(model.model.layers)),
            command=command,
            result=result,
            machine=machine,
        )
        print(_line(record), flush=True)


def _line(record: dict[str, Any]) -> str:
    point, figures = record["point"], record.get("figures")
    what = f"{record['run']} {record['mode']} {point['tokens']} tokens {point['layers']} layers"
    if point["microbatches"] > 1:
        what += f" {point['microbatches']} microbatches"
    if point["policy"]:
        what += f" {dict(point['policy'])}"
    if figures is None:
        return f"{what}: {record['outcome']}: {record['reason']} [{record['seconds']:.0f} s]"
    peak = figures["peak_bytes"]
    memory = "" if peak is None else f", peak {peak / 2**30:.2f} GiB"
    digest = str(figures["gradient_digest"])[:8]
    return (
        f"{what}: {figures['step_ms']:.1f} ms ({figures['step_ms_min']:.1f} to "
        f"{figures['step_ms_max']:.1f}), queued {figures['forward_queued_ms']:.0f} + "
        f"{figures['step_queued_ms'] - figures['forward_queued_ms']:.0f} ms{memory}, "
        f"first {figures['first_step_ms'] or 0:.0f} ms, digest {digest} "
        f"[build {record['build_seconds']:.0f} s, {record['seconds']:.0f} s]"
    )
