# SPDX-License-Identifier: Apache-2.0
"""The processes of a pipeline run: who computes which stages, on which device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from activation_swap.errors import Reason
from activation_swap.trainer.device import resolve_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from activation_swap.errors import ActivationSwapError

__all__ = ["Ranks", "join_ranks"]


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


def _no_ranks(pp_size: int, *, processes: int | None) -> ActivationSwapError:
    alone = "a process that torchrun did not start"
    return Reason.NO_RANKS.error(
        where=f"pp_size: {pp_size}",
        found=alone if processes is None else f"{processes} processes",
    )
