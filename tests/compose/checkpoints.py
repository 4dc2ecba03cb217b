# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written with the swap on and read with it off, and the reverse."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeForCausalLM

from tests.compose.combination import Combination
from tests.compose.run import Figures, Kind, Run, check_equal
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS"]

_MICROBATCHES = 8
_PER_STEP = 2

Trajectory = tuple[Run, set[str]]


@contextmanager
def _shared_directory() -> Iterator[str]:
    """Give all ranks the directory of rank 0."""
    with TemporaryDirectory() as directory:
        paths: list[Any] = [directory]
        if dist.is_initialized():
            dist.broadcast_object_list(paths)
        yield paths[0]
        if dist.is_initialized():
            dist.barrier()


def _build(run: Run, model: Any, *, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    run.apply(model)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(run: Run, model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for number in numbers:
        with run.step():
            loss = model(**batch(10 * number + rank)).loss
            loss.backward()
            run.record(model, loss)
            del loss
        if number % _PER_STEP == _PER_STEP - 1:
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in model.named_parameters():
        run.keep(f"trained.{name}", weight)


def distributed(writes: Kind, reads: Kind, *, at: int, sharded: bool) -> Trajectory:
    """Write weights, optimizer and gradients with DCP; read them into a new model; train on.

    Args:
        writes: What the run that writes does.
        reads: What the run that reads does.
        at: Microbatches before the checkpoint; an odd number is in mid-accumulation.
        sharded: Whether FSDP2 shards the models.
    """
    writer, reader = Run(writes, steps=at), Run(reads, steps=_MICROBATCHES - at)
    with _shared_directory() as directory:
        model, optimizer = _build(writer, tiny_model(), sharded=sharded)
        _train(writer, model, optimizer, range(at))
        state = _state(model, optimizer)
        state_dict_saver.save(state, checkpoint_id=directory)
        keys = {*state["weights"], *state["moments"]["state"]}
        model, optimizer = _build(reader, tiny_model(), sharded=sharded)
        state = _state(model, optimizer)
        state_dict_loader.load(state, checkpoint_id=directory)
    set_state_dict(
        model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"]
    )
    for name, weight in model.named_parameters():
        weight.grad = state["gradients"][name] if at % _PER_STEP else None
    _train(reader, model, optimizer, range(at, _MICROBATCHES))
    return reader, keys


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    # Fills in the moments of an optimizer without steps, by a step without gradients.
    weights, moments = get_state_dict(model, optimizer)
    return {"weights": weights, "moments": moments, "gradients": gradients}


def pretrained(writes: Kind, reads: Kind) -> Trajectory:
    """Write with ``save_pretrained``, read with ``from_pretrained``, train on."""
    half = _MICROBATCHES // 2
    writer, reader = Run(writes, steps=half), Run(reads, steps=half)
    with TemporaryDirectory() as directory:
        model, optimizer = _build(writer, tiny_model(), sharded=False)
        _train(writer, model, optimizer, range(half))
        model.save_pretrained(directory)
        keys = set(model.state_dict())
        for path in Path(directory).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                keys |= set(file.keys())
        model = Qwen3MoeForCausalLM.from_pretrained(directory).train()
    model, optimizer = _build(reader, model, sharded=False)
    _train(reader, model, optimizer, range(half, _MICROBATCHES))
    return reader, keys


def check(trajectory: Callable[[Kind, Kind], Trajectory]) -> Figures:
    """Compare off-off with on-off, off-on and on-on: losses, gradients, weights and keys."""
    with warnings.catch_warnings():
        # DCP says that it runs in one process.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        expected, keys = trajectory(Kind.PLAIN, Kind.PLAIN)
        for writes, reads in (
            (Kind.SWAPPED, Kind.PLAIN),
            (Kind.PLAIN, Kind.SWAPPED),
            (Kind.SWAPPED, Kind.SWAPPED),
        ):
            got, got_keys = trajectory(writes, reads)
            check_equal(expected, got)
            assert got_keys == keys, got_keys ^ keys
    assert got.stats.saved_bytes > 0
    return {"saved_bytes": got.stats.saved_bytes, "keys": len(keys)}


def _combinations() -> Iterator[Combination]:
    for sharded, (at, moment) in (
        (sharded, case)
        for sharded in (False, True)
        for case in ((4, "between steps"), (5, "in mid-accumulation"))
    ):
        yield Combination(
            tool="Distributed checkpoint",
            name=f"{'FSDP2, apply then shard' if sharded else 'one process'}; {moment}",
            check=partial(check, partial(distributed, at=at, sharded=sharded)),
            ranks=2 if sharded else 1,
            quick=at % _PER_STEP == 1,
            remark="written on, read off; the reverse; on and on",
        )
    yield Combination(
        tool="save_pretrained",
        name="from_pretrained, then train on",
        check=partial(check, pretrained),
        remark="no key of state_dict or safetensors differs",
    )


COMBINATIONS = tuple(_combinations())
