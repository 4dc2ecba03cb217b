# SPDX-License-Identifier: Apache-2.0
"""What the fault tests share: shapes by device, stalled copies, poison, failing memory."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from activation_swap import Swap, SwapPolicy, registry
from activation_swap.core.accelerator_transfer import AcceleratorTransfer
from activation_swap.core.link import Links, transfer_for
from tests.models import EVERYTHING, MID, TINY, build, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from activation_swap import SwapStats
    from activation_swap.core.install import InstalledSwap
    from activation_swap.core.transfer import Fence, Transfer

__all__ = [
    "Stalled",
    "apply",
    "at_base",
    "batch",
    "everything",
    "fails_at_slab",
    "model_for",
    "next_backward",
    "one_rank",
    "poisoned",
    "policy_for",
    "queued_ahead",
    "slow_links",
]


def model_for(device: torch.device, **changes: Any) -> Any:
    """Return TINY in fp32 on a CPU, MID in bf16 on an accelerator; equal weights each time."""
    if device.type == "cpu":
        return build(TINY, attention="sdpa", **changes)
    shape = MID | {"num_hidden_layers": 8}
    return build(shape, attention="sdpa", dtype=torch.bfloat16, device=device, **changes)


def policy_for(device: torch.device) -> SwapPolicy:
    """Return a policy that moves all of TINY, or the default one for MID."""
    return EVERYTHING if device.type == "cpu" else SwapPolicy()


def everything(device: torch.device) -> SwapPolicy:
    """Return a policy that moves tensors of any size; slabs as large as the model needs."""
    return EVERYTHING if device.type == "cpu" else SwapPolicy(min_bytes=1)


def batch(model: Any, *, length: int | None = None, seed: int = 1) -> torch.Tensor:
    """Return tokens of the length that the cases name for this device."""
    if length is None:
        length = 10 if model.device.type == "cpu" else 2048
    return tokens(model, length=length, seed=seed)


def apply(model: Any, policy: SwapPolicy | None = None) -> Swap:
    """Swap a model as a trainer does."""
    return registry.apply("attention", model, policy=policy or policy_for(model.device))


def at_base(swap: InstalledSwap | Swap) -> bool:
    """Whether no graph holds anything any more; what only cycles hold is collected first."""

    def nothing(stats: SwapStats) -> bool:
        return stats.live_groups == stats.resident_bytes == stats.host_bytes_in_use == 0

    return nothing(swap.stats()) or (gc.collect() >= 0 and nothing(swap.stats()))


def next_backward() -> None:
    """Run a backward of one node.

    What an aborted backward had queued, and its graph with it, torch keeps until the thread's next
    one; with or without a swap.
    """
    torch.ones(1, requires_grad=True).sum().backward()


class Stalled(AcceleratorTransfer):
    """Every copy starts late, and what it will overwrite on the host is NaN before.

    A missing wait then reads or writes at a time when the memory belongs to somebody else.

    Args:
        device: A CUDA device.
        cycles: How long a copy is held up, in clock cycles of the device.
    """

    def __init__(self, device: torch.device, cycles: int = 2_000_000) -> None:
        super().__init__(device)
        self.cycles = cycles
        self.copies = 0
        self._poison = torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=device)

    def offload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
        after = tuple(after)
        with self._d2h_stream:
            torch.cuda._sleep(self.cycles)
        for fence in after:
            if fence.lane != self._d2h_lane:
                self._d2h_stream.wait_event(fence.event)
        with self._d2h_stream:
            for _, host in moves:
                for piece in host:
                    self._overwrite(piece)
        self.copies += len(moves)
        return super().offload(moves, stream=stream, after=after)

    def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
        with self._h2d_stream:
            torch.cuda._sleep(self.cycles)
        self.copies += len(moves)
        return super().reload(moves, stream=stream, after=after)

    def _overwrite(self, piece: torch.Tensor) -> None:
        octets = piece.as_strided((piece.numel(),), (1,)).view(torch.uint8)
        for part in octets.split(self._poison.numel()):
            part.copy_(self._poison[: part.numel()], non_blocking=True)


def slow_links(device: torch.device, policy: SwapPolicy, kind: Any = Stalled) -> Links:
    """Return links with stalled copies on an accelerator, and ordinary ones on a CPU."""
    make = transfer_for if device.type == "cpu" else kind
    return Links(policy, make_transfer=make)


@contextmanager
def queued_ahead(model: Any, cycles: int) -> Iterator[None]:
    """Hold the device up at the first layer of each forward, for the host to queue far ahead.

    The device then runs the step without a pause, in the order of its streams and events alone. On
    a slow host it would wait for the next kernel instead, and a copy in the meantime be complete
    although nothing waits for it.

    Args:
        model: On a CUDA device.
        cycles: How long, in clock cycles of the device; a step should be queued within.
    """
    first = model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda *_: torch.cuda._sleep(cycles))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def poisoned(model: Any) -> Iterator[None]:
    """Overwrite with NaN what the device's allocator has free, at every attention and gradient."""
    config = model.config
    sizes = [
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
        config.hidden_size,
    ]

    def poison(tokens_per_batch: int, device: torch.device) -> None:
        for size in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                # Several at once: one tensor would be given the same block again and again.
                held = [
                    torch.full((tokens_per_batch * size,), torch.nan, dtype=dtype, device=device)
                    for _ in range(4)
                ]
                del held

    count = [1]

    def after_attention(_module: Any, _args: Any, result: Any) -> None:
        hidden = result[0]
        count[0] = hidden.shape[0] * hidden.shape[1]
        poison(count[0], hidden.device)

    handles: list[Any] = []
    for layer in model.model.layers:
        handles.append(layer.self_attn.register_forward_hook(after_attention))
        handles.append(
            layer.self_attn.o_proj.weight.register_post_accumulate_grad_hook(
                lambda weight: poison(count[0], weight.device)
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fails_at_slab(number: int, *, policy: SwapPolicy) -> Links:
    """Return links whose pinned slab ``number``, counted from 0, and all later ones fail."""
    made = 0

    def make(device: torch.device) -> Transfer:
        transfer: Any = transfer_for(device)
        allocate = transfer.allocate_slab

        def allocate_or_fail(nbytes: int) -> torch.Tensor:
            nonlocal made
            if made >= number:
                message = "CUDA error: out of memory"
                raise RuntimeError(message)
            made += 1
            return allocate(nbytes)

        transfer.allocate_slab = allocate_or_fail
        return transfer

    return Links(policy, make_transfer=make, system_headroom=lambda: None)


@contextmanager
def one_rank(path: Path) -> Iterator[Any]:
    """Be a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
