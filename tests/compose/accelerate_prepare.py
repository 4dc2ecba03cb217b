# SPDX-License-Identifier: Apache-2.0
"""Accelerate's ``prepare`` before and after ``apply``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]


def train(run: Run, *, apply_first: bool, precision: str = "no") -> None:
    """Train with gradient accumulation, on what ``prepare`` makes of model and optimizer."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = tiny_model()
    if apply_first:
        run.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if not apply_first:
        run.apply(accelerator.unwrap_model(prepared))
    for step in range(run.steps):
        with run.step():
            for number in range(2):
                with accelerator.accumulate(prepared):
                    seed = 2 * step + number + 100 * accelerator.process_index
                    loss = prepared(**batch(seed)).loss
                    accelerator.backward(loss)
                    run.record(model, loss)
                    del loss
                    optimizer.step()
                    optimizer.zero_grad()
    accelerator.free_memory()


def _combinations() -> Iterator[Combination]:
    for ranks, precision, first in (
        (1, "bf16", True),
        (1, "bf16", False),
        (2, "no", True),
        (2, "no", False),
    ):
        yield Combination(
            tool="Accelerate",
            name=(
                f"{'apply, then prepare' if first else 'prepare, then apply to unwrap_model'}; "
                f"{'one process, bf16' if ranks == 1 else 'DDP'}"
            ),
            check=partial(compare, partial(train, apply_first=first, precision=precision)),
            ranks=ranks,
        )


COMBINATIONS = tuple(_combinations())
