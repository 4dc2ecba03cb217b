# SPDX-License-Identifier: Apache-2.0
"""FSDP2: ``fully_shard`` on each layer and on the root, before and after ``apply``."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(
    run: Run,
    *,
    apply_first: bool,
    microbatches: int = 1,
    parts: tuple[str, ...] = ("",),
    **options: Any,
) -> None:
    """Train; the gradients are synchronised after the last microbatch.

    Args:
        run: Plain or swapped.
        apply_first: Whether ``apply`` comes before ``fully_shard``.
        microbatches: Forwards and backwards per step.
        parts: What is sharded of each layer, inside out.
        options: Of ``fully_shard``.
    """
    model = tiny_model()
    if apply_first:
        run.apply(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        for part in parts:
            fully_shard(layer.get_submodule(part), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if not apply_first:
        run.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        with run.step():
            for number in range(microbatches):
                model.set_requires_gradient_sync(number == microbatches - 1)
                seed = (step * microbatches + number) * dist.get_world_size() + dist.get_rank()
                loss = model(**batch(seed)).loss
                loss.backward()
                run.record(model, loss)
                del loss
        optimizer.step()
        optimizer.zero_grad()


def _combinations() -> Iterator[Combination]:
    variants: dict[str, dict[str, Any]] = {
        "reshard after forward": {},
        "no reshard after forward": {"reshard_after_forward": False},
        "mixed precision": {"mp_policy": _BF16},
        "CPU offload policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "gradient accumulation": {"microbatches": 2},
        "attention sharded on its own": {"parts": ("self_attn", "")},
        "projections sharded on their own": {
            "parts": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "")
        },
    }
    measured = {"reshard after forward", "no reshard after forward", "mixed precision"}
    for (name, options), first in product(variants.items(), (True, False)):
        scenario = partial(train, apply_first=first, **options)
        yield Combination(
            tool="FSDP2",
            name=f"{'apply, then shard' if first else 'shard, then apply'}; {name}",
            check=partial(compare, scenario, memory=name in measured),
            ranks=2,
            quick=first or name in measured,
        )


COMBINATIONS = tuple(_combinations())
