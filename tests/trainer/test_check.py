# SPDX-License-Identifier: Apache-2.0
"""The command ``activation-swap check``: what it prints, and when it says no."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from activation_swap import SwapStats
from activation_swap.compat.canary import tiny_model
from activation_swap.testing import Comparison
from activation_swap.trainer import check
from activation_swap.trainer.__main__ import main

pytestmark = pytest.mark.level0


def test_this_machine_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("activation_swap: attention swap works here\n")
    assert "3 steps each way: bits equal" in text


def test_json_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cpu", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["works"] is True
    assert {"activation_swap", "torch", "transformers"} <= report["versions"].keys()
    assert report["link"] is None
    assert len(report["facts"]) > 20
    assert report["self_test"]["bits_equal"]
    assert report["self_test"]["reloaded_bytes"] > 0


@pytest.mark.parametrize(("back", "said"), [(4, True), (8, False)])
def test_it_is_said_why_less_came_back_than_went_out(
    back: int,
    said: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    moved = SwapStats(offloaded_bytes=8, reloaded_bytes=back)
    found = Comparison(steps=3, first_difference=None, stats=moved)
    monkeypatch.setattr(check, "compare_runs", lambda *_, **__: found)

    assert main(["check", "--device", "cpu"]) == 0

    assert ("backward found the rest still on the device" in capsys.readouterr().out) == said


def no_memory(_: Any) -> Any:
    def allocate_slab(_: int) -> None:
        msg = "cannot pin"
        raise RuntimeError(msg)

    return SimpleNamespace(allocate_slab=allocate_slab)


def recomputing() -> Any:
    model: Any = tiny_model()
    model.model.layers[0].gradient_checkpointing = True
    return model


def differing(*_: Any, **__: Any) -> Comparison:
    return Comparison(
        steps=3, first_difference="gradient of x in step 1", stats=SwapStats(offloaded_bytes=1)
    )


def failing(*_: Any, **__: Any) -> Comparison:
    msg = "no kernel"
    raise RuntimeError(msg)


@pytest.mark.parametrize(
    ("name", "replacement", "said"),
    [
        ("transfer_for", no_memory, "could not be had: cannot pin"),
        ("tiny_model", recomputing, "AS303 gradient checkpointing: found on, expected off"),
        ("installed_release", lambda: "4.50.0", "AS201 transformers release: found 4.50.0"),
        ("compare_runs", differing, "bits differ: gradient of x in step 1"),
        ("compare_runs", failing, "failed: RuntimeError: no kernel"),
    ],
)
def test_what_would_not_work_is_said(
    name: str,
    replacement: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, name, replacement)

    assert main(["check", "--device", "cpu"]) == 1

    text = capsys.readouterr().out
    assert text.startswith("activation_swap: attention swap does not work here\n")
    assert said in text


def test_a_device_that_does_not_repeat_itself_is_judged_by_the_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = SwapStats(offloaded_bytes=8, reloaded_bytes=8)
    found = Comparison(steps=3, first_difference="loss in step 0", repeats=False, stats=moved)
    monkeypatch.setattr(check, "compare_runs", lambda *_, **__: found)

    assert main(["check", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert "bits differ: loss in step 0; and so without the swap" in text


def test_an_operation_without_a_deterministic_form_is_not_held_against_the_swap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = SwapStats(offloaded_bytes=8, reloaded_bytes=8)
    strict = []

    def compare_runs(*_: Any, **__: Any) -> Comparison:
        strict.append(torch.are_deterministic_algorithms_enabled())
        if strict[-1]:
            msg = "index_add does not have a deterministic implementation"
            raise RuntimeError(msg)
        return Comparison(steps=3, first_difference=None, stats=moved)

    monkeypatch.setattr(check, "compare_runs", compare_runs)

    assert main(["check", "--device", "cpu"]) == 0

    assert strict == [True, False]
    assert "bits equal" in capsys.readouterr().out


def test_another_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "npu"]) == 2
    assert capsys.readouterr().err.startswith("AS403")


def test_it_needs_nothing_of_the_trainers_extra() -> None:
    script = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['pydantic', 'rich', 'matplotlib'])\n"
        "import activation_swap.trainer.check"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
