# SPDX-License-Identifier: Apache-2.0
"""Where tests run: what every machine has, and what only some have."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# A machine with an accelerator may lack what only the trainer and the documentation need.
NEED_EXTRAS = ["api", "benchmarks", "compose", "docs", "pipeline", "rejections", "trainer"]
NEED_TRL = ["compose/test_callback.py", "compose/test_combinations.py"]
collect_ignore = [
    *(NEED_EXTRAS if find_spec("pydantic") is None else []),
    *(NEED_TRL if find_spec("trl") is None else []),
]

# cuBLAS reads it when it is first used, and torch refuses deterministic algorithms without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - cuBLAS has no other way


@pytest.fixture
def exact() -> Iterator[None]:
    """Make equal computations give equal bits: on any device, with any number of cores."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        # Of the fused kernels only flash promises a deterministic backward.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.level0),
        pytest.param("accelerator", marks=pytest.mark.level1),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run a test on the CPU in CI, and the same test on the accelerator of a machine with one."""
    import torch

    return torch.device("cpu") if request.param == "cpu" else _accelerator()


@pytest.fixture
def accelerator() -> torch.device:
    """Return the accelerator; a machine without one skips."""
    return _accelerator()


def _accelerator() -> torch.device:
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        pytest.skip("no accelerator")
    return torch.device(found.type, torch.accelerator.current_device_index())
