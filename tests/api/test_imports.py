# SPDX-License-Identifier: Apache-2.0
"""What is imported when, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

HEAVY = ("torch", "transformers", "numpy", "activation_swap.core", "activation_swap.trainer")


def imported(script: str) -> list[str]:
    """Run a script and return which of the heavy modules it left imported."""
    report = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", f"{script}\n{report}"], check=True, capture_output=True, text=True
    )
    return run.stdout.split()


@pytest.mark.parametrize(
    "script",
    [
        "import activation_swap",
        "from activation_swap import registry, SwapPolicy, TrainingSetup, errors",
        "import activation_swap.adapters, activation_swap.compat.facts",
        "import activation_swap; activation_swap.registry.apply('none', object())",
        "import activation_swap; activation_swap.registry.model_classes",
        "import activation_swap; print(end=str(activation_swap.registry.explain(1))[:0])",
    ],
)
def test_nothing_heavy_is_imported(script: str) -> None:
    assert imported(script) == []


def test_none_does_not_import_the_core() -> None:
    script = (
        "from activation_swap import registry\n"
        "from torch import nn\n"
        "registry.apply('none', nn.Linear(1, 1)).remove()"
    )

    assert "activation_swap.core" not in imported(script)


def test_a_plan_needs_no_torch() -> None:
    assert imported("import activation_swap.pipelining") == ["activation_swap.core"]


def test_the_core_never_sees_transformers() -> None:
    assert "transformers" not in imported("import activation_swap.core.install")
