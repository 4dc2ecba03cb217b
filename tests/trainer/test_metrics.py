# SPDX-License-Identifier: Apache-2.0
"""Metrics survive crashes and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from activation_swap.trainer.metrics import MetricsFile, read_metrics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


def write(path: Path, *steps: int, after_step: int = 0) -> None:
    metrics = MetricsFile(path, after_step=after_step)
    for step in steps:
        metrics.write(step=step, loss=0.5)
    metrics.close()


def test_one_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 1, 2)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n'


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_is_null(value: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(step=1, loss=float(value))
    metrics.close()
    assert path.read_text() == '{"step": 1, "loss": null}\n'


def test_lines_are_readable_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(step=1)
    assert [line["step"] for line in read_metrics(path)] == [1]
    metrics.close()


def test_resume_drops_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    write(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_new_run_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    write(path, 1)
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "garbage", [b"\0" * 40 + b"\n", b'{"step": 3, "lo\n', b"\xff\n"], ids=["NULs", "half", "bytes"]
)
def test_reading_ends_at_the_first_line_that_a_crash_of_the_machine_spoiled(
    garbage: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(garbage + b'{"step": 4}\n')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
