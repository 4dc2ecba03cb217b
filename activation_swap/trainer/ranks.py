# SPDX-License-Identifier: Apache-2.0
"""The processes of a pipeline run: who computes which stages, on which device."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from activation_swap.errors import ActivationSwapError, Reason
from activation_swap.trainer.device import resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Ranks", "join_ranks", "on_first_rank", "refuse_ranks"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among the others.

    Attributes:
        device: Its device.
        pipeline: The ranks that compute one pipeline.
        data: The ranks that compute the same stages on other data.
    """

    device: torch.device
    pipeline: DeviceMesh
    data: DeviceMesh


@contextmanager
def join_ranks(*, device: str, pp_size: int) -> Iterator[Ranks]:
    """Join the group of processes that torchrun started, and leave it at the end.

    Args:
        device: As in :func:`resolve_device`. NCCL (or the accelerator's own) and gloo serve.
        pp_size: Ranks of one pipeline; the others compute the same stages on other data.

    Raises:
        RejectedError: AS412 when there is no such group, or not of this size.
    """
    own = resolve_device(device)
    if not dist.is_torchelastic_launched():
        raise _no_ranks(pp_size, processes=None)
    # A rank that waits for others in a collective runs no handler of Python: it would not end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if own.type != "cpu":
        own = torch.device(own.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(own)
    dist.init_process_group(dist.get_default_backend_for_device(own))
    try:
        size = dist.get_world_size()
        if size % pp_size:
            raise _no_ranks(pp_size, processes=size)
        shape = (pp_size, size // pp_size)
        mesh = init_device_mesh(own.type, shape, mesh_dim_names=("pp", "dp"))
        yield Ranks(device=own, pipeline=mesh["pp"], data=mesh["dp"])
    finally:
        dist.destroy_process_group()


def on_first_rank(function: Callable[[], T]) -> T | None:
    """Call on rank 0 alone; what rank 0 refuses, every rank refuses, and none waits for it.

    Args:
        function: What to call.

    Returns:
        Its result on rank 0, ``None`` on the others.

    Raises:
        ActivationSwapError: What the function raised, on every rank.
    """
    result = None
    refusal: list[ActivationSwapError | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = function()
        except ActivationSwapError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal)
    if refusal[0] is not None:
        raise refusal[0]
    return result


def refuse_ranks() -> None:
    """Refuse to be one of several processes that torchrun started for a run without a pipeline.

    Raises:
        RejectedError: AS412.
    """
    if not dist.is_torchelastic_launched():
        return
    dist.init_process_group("gloo")
    try:
        processes = dist.get_world_size()
    finally:
        dist.destroy_process_group()
    if processes > 1:
        raise _no_ranks(
            1,
            processes=processes,
            expected="one process",
            fix="start it without torchrun, or set pp_size above 1",
        )


def _no_ranks(
    pp_size: int,
    *,
    processes: int | None,
    expected: str | None = None,
    fix: str | None = None,
) -> ActivationSwapError:
    alone = "a process that torchrun did not start"
    return Reason.NO_RANKS.error(
        where=f"pp_size: {pp_size}",
        found=alone if processes is None else f"{processes} processes",
        expected=expected,
        fix=fix,
    )
