# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by ``parallelize_module``: alone, with sequence parallelism, with FSDP2."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]

_SEQUENCE = 40


def split_heads(model: Any, mesh: DeviceMesh) -> None:
    """Split q, k, v by columns and o by rows: each rank computes some of the heads."""
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan["self_attn.o_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def split_heads_and_sequence(model: Any, mesh: DeviceMesh) -> None:
    """Let each rank also hold some of the sequence outside of attention and MoE block."""
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_output=True,
        ),
    }
    gather = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
        parallelize_module(layer.mlp, mesh, gather)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def train(run: Run, *, apply_first: bool, sequence: bool = False, replicas: int = 1) -> None:
    """Train on a mesh of ``replicas`` rows, each of which shares its weights by FSDP2."""
    tensor = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, tensor), mesh_dim_names=("data", "tensor"))
    model = tiny_model(num_key_value_heads=max(2, tensor))
    if apply_first:
        run.apply(model)
    (split_heads_and_sequence if sequence else split_heads)(model, mesh["tensor"])
    if replicas > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    if not apply_first:
        run.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    # The model counts the positions of what it embeds, which is a part of the sequence.
    positions = {"position_ids": torch.arange(_SEQUENCE)[None]} if sequence else {}
    for step in range(run.steps):
        with run.step():
            seed = step * replicas + mesh["data"].get_local_rank()
            loss = model(**batch(seed, sequence=_SEQUENCE), **positions).loss
            loss.backward()
            run.record(model, loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def _combinations() -> Iterator[Combination]:
    for sequence, first in product((False, True), (True, False)):
        yield Combination(
            tool="Tensor parallel",
            name=(
                f"{'apply, then split' if first else 'split, then apply'}; "
                f"q, k, v by columns, o by rows{', sequence parallel' if sequence else ''}"
            ),
            check=partial(
                compare, partial(train, apply_first=first, sequence=sequence), memory=not sequence
            ),
            ranks=2,
            remark="DTensors move as their local tensors; bytes counted are local",
        )
    for first in (True, False):
        yield Combination(
            tool="Tensor parallel",
            name=f"{'apply, then split' if first else 'split, then apply'}; four ranks",
            check=partial(compare, partial(train, apply_first=first)),
            ranks=4,
            quick=False,
        )
        yield Combination(
            tool="TP x FSDP2",
            name=f"{'apply, then split and shard' if first else 'split and shard, then apply'}",
            check=partial(compare, partial(train, apply_first=first, replicas=2)),
            ranks=4,
            quick=not first,
        )


COMBINATIONS = tuple(_combinations())
