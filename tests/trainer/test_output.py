# SPDX-License-Identifier: Apache-2.0
"""The output directory is one run's, can be written to, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from activation_swap.errors import Reason, RejectedError, SwapStateError
from activation_swap.trainer.output import OutputDirectory

pytestmark = pytest.mark.unit

REPORT = ("report.json", "report.md", "report.png")


def refusal(path: Path) -> Reason:
    with pytest.raises(RejectedError) as caught:
        OutputDirectory(path)
    return caught.value.reason


def test_directory_is_one_runs_at_a_time(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path):
        assert refusal(tmp_path) is Reason.OUTPUT_IN_USE
    with OutputDirectory(tmp_path):
        pass


def test_what_was_refused_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert refusal(tmp_path) is Reason.OUTPUT_UNWRITABLE
    (tmp_path / "metrics.jsonl").rmdir()
    OutputDirectory(tmp_path).__exit__()


@pytest.mark.parametrize("name", ["metrics.jsonl", *REPORT])
def test_directory_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert refusal(tmp_path) is Reason.OUTPUT_UNWRITABLE


def test_file_in_the_place_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    assert refusal(tmp_path) is Reason.OUTPUT_UNWRITABLE


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_name_that_no_directory_can_have_is_refused(name: str, tmp_path: Path) -> None:
    assert refusal(tmp_path / name) is Reason.OUTPUT_UNWRITABLE


def test_directory_where_no_file_can_be_made_is_refused() -> None:
    """Of the kernel, so that it holds for root too."""
    assert refusal(Path("/proc/self/fd")) is Reason.OUTPUT_UNWRITABLE


def test_probe_leaves_nothing_but_the_lock(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with OutputDirectory(tmp_path):
        pass
    assert {path.name for path in tmp_path.rglob("*")} == {".lock", "checkpoints"}


@pytest.mark.parametrize(
    ("resumable", "checkpoint", "fix"),
    [
        (True, True, "go on from the newest checkpoint"),
        (True, False, "keep these metrics"),
        (False, True, "set another output"),
        (False, False, "set another output"),
    ],
)
def test_advice_is_what_would_help(
    *, resumable: bool, checkpoint: bool, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("anything")
    if checkpoint:
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with OutputDirectory(tmp_path) as output, pytest.raises(RejectedError) as caught:
        output.refuse_earlier_run(resumable=resumable)
    assert caught.value.reason is Reason.EARLIER_RUN_IN_THE_WAY
    assert fix in caught.value.fix
    assert ("--resume" in caught.value.fix) is resumable


def test_empty_directory_is_no_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with OutputDirectory(tmp_path) as output:
        output.refuse_earlier_run(resumable=True)


def test_report_replaces_all_files_of_an_earlier_one(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path) as output:
        output.replace_report({name: lambda path: path.write_text("old") for name in REPORT})
        assert {(tmp_path / name).read_text() for name in REPORT} == {"old"}
        output.replace_report({"report.json": lambda path: path.write_text("new")})
    assert [path.name for path in tmp_path.glob("*report*")] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "new"


@pytest.mark.parametrize("failing", REPORT)
def test_report_that_cannot_be_written_leaves_the_earlier_one(failing: str, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        if failing in path.name:
            path.symlink_to("/dev/full")
        path.write_text("new")

    with OutputDirectory(tmp_path) as output:
        output.replace_report({name: lambda path: path.write_text("old") for name in REPORT})
        with pytest.raises(SwapStateError) as caught:
            output.replace_report(dict.fromkeys(REPORT, write))
    assert caught.value.reason is Reason.RUN_BROKE_OFF
    assert caught.value.where == str(tmp_path / failing)
    assert {path.name: path.read_text() for path in tmp_path.glob("*report*")} == dict.fromkeys(
        REPORT, "old"
    )
