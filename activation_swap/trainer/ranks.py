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

    from activation_swap.trainer.config import Config

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
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the group of processes that torchrun started, and leave it at the end.

    Args:
        config: ``pp_size`` and ``device``. NCCL (or the accelerator's own) and gloo serve.

    Raises:
        RejectedError: AS412 when there is no such group, or not of this size.
    """
    device = resolve_device(config.device)
    if not dist.is_torchelastic_launched():
        raise _no_ranks(config, processes=None)
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        size = dist.get_world_size()
        if size % config.pp_size:
            raise _no_ranks(config, processes=size)
        shape = (config.pp_size, size // config.pp_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
        yield Ranks(device=device, pipeline=mesh["pp"], data=mesh["dp"])
    finally:
        dist.destroy_process_group()


def _no_ranks(config: Config, *, processes: int | None) -> Exception:
    alone = "a process that torchrun did not start"
    return Reason.NO_RANKS.error(
        where=f"pp_size: {config.pp_size}",
        found=alone if processes is None else f"{processes} processes",
    )
