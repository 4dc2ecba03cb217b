# SPDX-License-Identifier: Apache-2.0
"""What is written for one measurement: what was asked for, beside what came out."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.runs import Point, Run

__all__ = ["result_path", "write_record"]


def result_path(out: Path, name: str, run: Run, number: int, position: int) -> Path:
    """Return the file of a process's point: names sort in the run's order."""
    return out / f"{name}-{number:02d}-{run.processes[number].mode}-{position:02d}.json"


def write_record(
    path: Path,
    name: str,
    run: Run,
    *,
    number: int,
    point: Point,
    command: str,
    result: dict[str, Any],
    machine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write one measurement's file and return its content.

    Args:
        path: The file.
        name: The run's.
        run: As it was carried out.
        number: Of the process in the run.
        point: What was measured.
        command: What the user called.
        result: ``outcome`` and ``figures``, or ``reason``.
        machine: Where; ``None`` when the process did not get so far.
    """
    record = {
        "run": name,
        "mode": run.processes[number].mode,
        "repeat": run.processes[number].repeat,
        "shape": run.shape,
        "point": asdict(point),
        "gpus": 1,
        "warmup": run.warmup,
        "steps": run.steps,
        "lr": run.lr,
        "update": run.update,
        "deterministic": run.deterministic,
        **result,
        "machine": machine,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record
