# SPDX-License-Identifier: Apache-2.0
"""Autocast over fp32 weights, with a gradient scaler."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]


def train(run: Run, *, dtype: torch.dtype, frozen: bool = False, microbatches: int = 1) -> None:
    """Train under autocast; fp16 with a scaler whose scale changes on the way."""
    model = tiny_model()
    if frozen:
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(requires_grad=False)
    run.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, growth_interval=1)
    for step in range(run.steps):
        with run.step():
            for number in range(microbatches):
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(**batch(step * microbatches + number)).loss
                scaler.scale(loss).backward()
                run.record(model, loss)
                del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _combinations() -> Iterator[Combination]:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16 with GradScaler")):
        yield Combination(
            tool="Autocast over fp32 weights",
            name=name,
            check=partial(compare, partial(train, dtype=dtype), memory=True),
            remark="autocast caches its casts of trainable weights: they stay on the device",
        )
        yield Combination(
            tool="Autocast over fp32 weights",
            name=f"{name}, attention frozen",
            check=partial(compare, partial(train, dtype=dtype, frozen=True)),
            remark="casts of frozen weights are made for one call: they move",
        )
    yield Combination(
        tool="Autocast over fp32 weights",
        name="bf16, gradient accumulation",
        check=partial(compare, partial(train, dtype=torch.bfloat16, microbatches=2)),
    )


COMBINATIONS = tuple(_combinations())
