# SPDX-License-Identifier: Apache-2.0
"""``DistributedDataParallel`` around a model, before and after ``apply``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from activation_swap.errors import Reason
from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]


def train(run: Run, *, apply_first: bool, microbatches: int = 1, **options: Any) -> None:
    """Train; the gradients are synchronised after the last microbatch."""
    model = tiny_model()
    if apply_first:
        run.apply(model)
    wrapped = DistributedDataParallel(model, **options)
    if not apply_first:
        run.apply(wrapped.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        with run.step():
            for number in range(microbatches):
                last = number == microbatches - 1
                seed = (step * microbatches + number) * dist.get_world_size() + dist.get_rank()
                with nullcontext() if last else wrapped.no_sync():
                    loss = wrapped(**batch(seed)).loss
                    loss.backward()
                run.record(model, loss)
                del loss
        optimizer.step()
        optimizer.zero_grad()


def pass_the_wrapper() -> None:
    """Apply to what DDP made of the model."""
    Run.swapped().apply(DistributedDataParallel(tiny_model()))


def _combinations() -> Iterator[Combination]:
    variants: dict[str, dict[str, Any]] = {
        "static graph": {"static_graph": True},
        "dynamic graph": {},
        "no_sync": {"microbatches": 2},
        "gradients as bucket views": {"gradient_as_bucket_view": True},
    }
    for (name, options), first in product(variants.items(), (True, False)):
        scenario = partial(train, apply_first=first, **options)
        yield Combination(
            tool="DDP",
            name=f"{'apply, then wrap' if first else 'wrap, then apply'}; {name}",
            check=partial(compare, scenario, memory=name == "static graph"),
            ranks=2,
        )
    yield Combination(
        tool="DDP",
        name="the wrapper passed to apply",
        check=pass_the_wrapper,
        ranks=2,
        refused=Reason.WRAPPED_MODEL,
    )


COMBINATIONS = tuple(_combinations())
