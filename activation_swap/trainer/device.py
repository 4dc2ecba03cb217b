# SPDX-License-Identifier: Apache-2.0
"""The device of a run: which one, its clock, its memory, its determinism."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "determinism",
    "peak_device_bytes",
    "ran_out_of_memory",
    "reset_peak_device_bytes",
    "resolve_device",
    "synchronize",
]


def resolve_device(name: str) -> torch.device:
    """Return the device that ``name`` asks for.

    Args:
        name: ``auto``, or what ``torch.device`` takes.

    Returns:
        A device that can be used now; ``auto`` is the accelerator, and the CPU without one.

    Raises:
        RejectedError: AS403 when there is no such device here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    here = ["cpu"]
    if accelerator is not None:
        here += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    with suppress(RuntimeError):  # by torch, of text that names no device
        device = torch.device(name)
        index = "" if device.type == "cpu" else f":{device.index or 0}"
        if device.type + index in here:
            return device
    raise Reason.DEVICE_UNAVAILABLE.error(
        found=f"device: {name!r}", expected=" | ".join(["auto", *here])
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was launched. A CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak_device_bytes(device: torch.device) -> None:
    """Start the allocator's peak anew. Does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the allocator's peak since the reset in bytes, or ``None`` on a CPU."""
    if device.type == "cpu":
        return None
    return torch.accelerator.max_memory_allocated(device)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a device, or of this machine, did not suffice."""
    # torch raises a class of its own for accelerators alone.
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


@contextmanager
def determinism(*, enabled: bool) -> Iterator[None]:
    """Compute with deterministic algorithms alone inside the block: equal runs, equal bits.

    Args:
        enabled: Whether to do anything.

    Raises:
        RuntimeError: By torch, inside the block: an operation has no deterministic algorithm.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        # torch refuses cuBLAS without it, and cuBLAS has no other way to be told.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251
        # Never as a warning: flash attention's backward is deterministic only in strict mode.
        torch.use_deterministic_algorithms(mode=True)
    # Of the fused attention kernels only flash has a deterministic backward.
    exact = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]) if enabled else nullcontext()
    try:
        with exact:
            yield
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warn_only)
