# SPDX-License-Identifier: Apache-2.0
"""The generated pages are what the code says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_pages.py"


def test_generated_pages_are_current() -> None:
    run = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], check=False, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
