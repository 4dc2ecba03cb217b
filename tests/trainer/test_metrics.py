# SPDX-License-Identifier: Apache-2.0
"""Metrics survive crashes and resumes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from activation_swap.errors import Reason, RejectedError, SwapStateError
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


def test_a_new_run_starts_anew_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    write(path, 1)
    assert [line["step"] for line in read_metrics(path)] == [1]
    path.write_text("someone else's")
    write(path, 1)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl.1")] == [1, 2]
    assert (tmp_path / "metrics.jsonl.2").read_text() == "someone else's"
    assert len(list(tmp_path.iterdir())) == 3


def test_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("tail", [b"\0" * 40, b'{"step": 3, "lo\0\0'], ids=["NULs", "both"])
def test_end_that_a_crash_of_the_machine_spoiled_is_left_out(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    write(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\0" * 40,
        b'{"step": 3, "lo',
        b"\xff",
        b"[1]",
        b"3",
        b"null",
        b'{"epoch": 1}',
        b'{"step": "3"}',
        b'{"step": 0}',
        b'{"step": 1e400}',
        b"[" * 10_000,
    ],
    ids=lambda line: line[:20].decode("latin-1"),
)
def test_any_other_line_that_cannot_be_read_is_refused_and_nothing_lost(
    line: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1}\n' + line + b'\n{"step": 4}\n'
    path.write_bytes(before)
    with pytest.raises(RejectedError) as caught:
        write(path, after_step=4)
    assert caught.value.reason is Reason.UNREADABLE_METRICS
    assert caught.value.where == f"{path}: line 2"
    assert path.read_bytes() == before


def test_foreign_text_without_a_line_end_is_no_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("someone else's")
    with pytest.raises(RejectedError):
        write(path, after_step=4)
    assert path.read_text() == "someone else's"


def test_lines_that_are_kept_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{ "loss":0.50,"step":1 }\n{"step":2}\n')
    write(path, after_step=1)
    assert path.read_text() == '{ "loss":0.50,"step":1 }\n'


def test_lines_are_json_whatever_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(step=1, loss=float("nan"), seconds=float("inf"))
    metrics.close()
    assert path.read_text() == '{"step": 1, "loss": null, "seconds": null}\n'


def test_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for call in (partial(metrics.write, step=1), metrics.close):
        with pytest.raises(SwapStateError) as caught:
            call()
        assert caught.value.reason is Reason.RUN_BROKE_OFF
        assert caught.value.where == str(tmp_path / "metrics.jsonl")
