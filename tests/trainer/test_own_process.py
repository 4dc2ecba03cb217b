# SPDX-License-Identifier: Apache-2.0
"""A call in a process of its own: its result, its exceptions, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import psutil
import pytest

from activation_swap.errors import Reason, RejectedError, SwapStateError
from activation_swap.trainer.own_process import in_own_process

pytestmark = pytest.mark.level0

ROOT = Path(__file__).parents[2]
# Calls a process that tells its number and waits; tells how that ended.
PARENT = """
import sys
sys.path.insert(0, sys.argv[2])
from activation_swap.trainer.own_process import in_own_process
from tests.trainer.test_own_process import wait
if __name__ == "__main__":
    try:
        in_own_process(wait, sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted")
"""


def process_id(base: int, *, add: int) -> tuple[int, int]:
    return os.getpid(), base + add


def refuse() -> None:
    raise Reason.OUTPUT_IN_USE.error(found="a lock", where="here")


def break_down() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def test_it_runs_elsewhere_and_returns() -> None:
    pid, total = in_own_process(process_id, 1, add=2)
    assert pid != os.getpid()
    assert total == 3
    assert not psutil.pid_exists(pid)


def test_errors_come_back_whole_and_say_from_where() -> None:
    with pytest.raises(RejectedError) as caught:
        in_own_process(refuse)
    assert caught.value.where == "here"
    assert "in refuse" in "".join(traceback.format_exception(caught.value))


def test_killed_process_is_named() -> None:
    with pytest.raises(SwapStateError) as caught:
        in_own_process(break_down)
    assert caught.value.reason is Reason.RUN_BROKE_OFF
    assert caught.value.found == "exit code -9, and no result"


@pytest.mark.parametrize(
    ("number", "whole_group", "out"),
    [
        pytest.param(signal.SIGINT, False, b"interrupted\n", id="Ctrl-C, parent"),
        pytest.param(signal.SIGINT, True, b"interrupted\n", id="Ctrl-C, group"),
        pytest.param(signal.SIGKILL, False, b"", id="killed parent"),
    ],
)
def test_process_ends_with_its_parent(
    number: signal.Signals, *, whole_group: bool, out: bytes, tmp_path: Path
) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    told = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(told), str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        while not (told.exists() and told.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
        child = psutil.Process(int(told.read_text()))
        (os.killpg if whole_group else os.kill)(parent.pid, number)
        assert parent.communicate(timeout=20) == (out, b"")
    child.wait(timeout=10)
