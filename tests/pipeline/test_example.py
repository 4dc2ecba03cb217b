# SPDX-License-Identifier: Apache-2.0
"""The example of a scheduler of one's own, with microbatches of different lengths."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import run

import pytest

pytestmark = pytest.mark.level0

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_f_one_b.py"


@pytest.mark.timeout(600)
def test_the_hand_written_1f1b_loop() -> None:
    done = run([sys.executable, str(EXAMPLE)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    line = r"rank \d: losses and gradients equal: True, offloaded ([\d,]+) bytes, 0 reload misses"
    offloaded = re.findall(line, done.stdout)
    assert len(offloaded) == 2
    assert all(int(count.replace(",", "")) > 0 for count in offloaded)
