# SPDX-License-Identifier: Apache-2.0
"""The command line: dispatch, exit codes, messages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import activation_swap
from activation_swap.trainer import __main__ as command_line
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = Command(module="activation_swap.trainer.gone", summary="")
    monkeypatch.setitem(COMMANDS, "gone", gone)
    with pytest.raises(ModuleNotFoundError):
        main(["gone"])


def test_command_line_starts_without_torch() -> None:
    script = (
        "import sys, activation_swap.trainer.__main__\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
