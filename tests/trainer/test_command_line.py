# SPDX-License-Identifier: Apache-2.0
"""The command line: dispatch, exit codes, messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import activation_swap
from activation_swap.errors import Reason
from activation_swap.trainer import __main__ as command_line
from activation_swap.trainer import check
from activation_swap.trainer.__main__ import COMMANDS, Command, main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_two_functions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = import_module(COMMANDS[name].module)
    assert callable(module.add_arguments)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"activation-swap {name}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command.summary in out for command in COMMANDS.values())


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2
    assert "train" in capsys.readouterr().err


def test_rejection_is_a_message_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("activation_swap: attn\n")
    assert main(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("AS401: a key or value of the configuration is not legal")
    assert f"where:    {path}: activation_swap" in err
    assert "expected: none | attention" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["train", "compare"])
def test_set_replaces_a_value(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\n")
    assert main([command, str(path), "--set", "activation_swap=both"]) == 2
    assert "activation_swap: 'both'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"activation-swap {activation_swap.__version__}\n"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ModuleNotFoundError, "No module named 'pydantic'"),
        (ImportError, "cannot import name 'StrictDataclassError' from 'huggingface_hub.errors'"),
    ],
)
def test_missing_extra_says_what_to_install(
    kind: type[ImportError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: str) -> None:
        raise kind(said, name=said.split("'")[-2])

    monkeypatch.setattr(command_line, "import_module", fail)
    assert main(["train", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "pip install 'activation-swap[trainer]'" in err


def test_defect_of_our_own_is_not_taken_for_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Command(module="activation_swap.trainer.gone", summary="")
    monkeypatch.setitem(COMMANDS, "gone", gone)
    assert main(["gone"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("ModuleNotFoundError: No module named 'activation_swap.trainer.gone'\n")


def noted(error: BaseException) -> BaseException:
    error.add_note("newest checkpoint: here")
    return error


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (Reason.OUTPUT_IN_USE.error(found="a lock"), 2, "AS418"),
        (Reason.RUN_BROKE_OFF.error(found="a full disk"), 3, "AS417"),
        (PermissionError(13, "Permission denied", "a.txt"), 3, "where:    a.txt"),
        (MemoryError(), 3, "AS417"),
        (torch.OutOfMemoryError("of the device\nand a long tale"), 3, "of the device\n  exp"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), 3, "AS417"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT\nnewest checkpoint: here\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_end_has_its_code_and_no_traceback(
    error: BaseException,
    code: int,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "run", Mock(side_effect=noted(error)))
    assert main(["check"]) == code
    err = capsys.readouterr().err
    assert part in err
    assert err.endswith("newest checkpoint: here\n")
    assert "Traceback" not in err


def test_termination_is_raised_during_a_command_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(check, "run", lambda _: signal.raise_signal(signal.SIGTERM))
    assert main(["check"]) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


# Of rich, and of sys.stdout alone.
@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize("closed", ["pipe", "full"])
def test_output_that_nobody_takes_is_no_negative_result(arguments: list[str], closed: str) -> None:
    plan = ["plan", "--pp-size", "2", "--microbatches", "4", *arguments]
    command = [sys.executable, "-m", "activation_swap.trainer", *plan]
    if closed == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    finally:
        os.close(writer)
    assert done.returncode == 3
    assert done.stderr.startswith("AS417")
    assert len(done.stderr.splitlines()) == 4, done.stderr


def test_command_line_starts_without_torch() -> None:
    script = (
        "import sys, activation_swap.trainer.__main__\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
