# SPDX-License-Identifier: Apache-2.0
"""The parallel plans of Transformers: TP, EP and FSDP2 as ``from_pretrained`` sets them up."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]


def train(run: Run, **sizes: Any) -> None:
    """Train a model that Transformers distributes while it loads."""
    with TemporaryDirectory() as directory:
        paths: list[Any] = [directory]
        if dist.get_rank() == 0:
            tiny_model().save_pretrained(directory)
        dist.broadcast_object_list(paths)
        config = DistributedConfig(**sizes)
        model = Qwen3MoeForCausalLM.from_pretrained(paths[0], distributed_config=config).train()
        dist.barrier()
    run.apply(model)
    # DTensors of two meshes cannot share one launch over all weights.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    replicas = sizes.get("fsdp_size", 1)
    for step in range(run.steps):
        with run.step():
            loss = model(**batch(step * replicas + dist.get_rank() % replicas)).loss
            loss.backward()
            run.record(model, loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def _combinations() -> Iterator[Combination]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "tp_plan": ("Tensor parallel", {"tp_size": 2}),
        "ep_plan with tp_plan": ("Expert parallel", {"tp_size": 2, "ep_size": 2}),
        "ep_plan with fsdp_plan": ("Expert parallel", {"fsdp_size": 2, "ep_size": 2}),
        "fsdp_plan": ("FSDP2", {"fsdp_size": 2}),
    }
    for name, (tool, sizes) in variants.items():
        yield Combination(
            tool=tool,
            name=f"Transformers' own {name}",
            check=partial(compare, partial(train, **sizes)),
            ranks=2,
            remark="from_pretrained(..., distributed_config=...), then apply",
        )
    yield Combination(
        tool="TP x FSDP2",
        name="Transformers' own tp_plan, ep_plan and fsdp_plan",
        check=partial(compare, partial(train, tp_size=2, ep_size=2, fsdp_size=2)),
        ranks=4,
        quick=False,
    )


COMBINATIONS = tuple(_combinations())
