# SPDX-License-Identifier: Apache-2.0
"""The reading order of the core's files, as its docstrings tell it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from activation_swap import core
from activation_swap.core import schedule

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("package", [core, schedule])
def test_every_file_is_told_once(package: ModuleType) -> None:
    told = re.findall(r"^    (\w+): \S", str(package.__doc__), flags=re.MULTILINE)
    (folder,) = package.__path__
    files = {path.stem for path in Path(folder).iterdir() if not path.name.startswith("__")}

    assert sorted(told) == sorted(files)
