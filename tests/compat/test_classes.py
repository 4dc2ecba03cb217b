# SPDX-License-Identifier: Apache-2.0
"""Class names through renaming and wrapping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from activation_swap.compat.classes import original_class, peel, qualified_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_fully_shard_renames_and_is_seen_through() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))

    assert type(module) is not nn.Linear
    assert original_class(type(module)) is nn.Linear
    derived = type("Mine", (type(module),), {"__module__": "my_model"})
    assert original_class(derived) is derived


@pytest.mark.usefixtures("process_group")
def test_composable_ddp_renames_and_is_seen_through() -> None:
    from torch.distributed._composable.replicate import replicate

    module = replicate(nn.Linear(2, 2))

    assert type(module) is not nn.Linear
    assert original_class(type(module)) is nn.Linear


@pytest.mark.parametrize(
    "cls",
    [
        nn.Linear,
        nn.parallel.DistributedDataParallel,
        FullyShardedDataParallel,
        type("FSDPLinear", (nn.Identity, nn.Linear), {"__module__": "my_model"}),
    ],
)
def test_other_classes_are_what_they_are(cls: type) -> None:
    assert original_class(cls) is cls


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_peel_takes_wrappers_off() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Linear(2, 2)
    middle = checkpoint_wrapper(inner)
    outer = torch.compile(middle)

    assert peel(outer) == (outer, middle, inner)
    assert peel(inner) == (inner,)
    assert peel(None) == (None,)


def test_qualified_name_has_module_and_nesting() -> None:
    assert qualified_name(nn.Linear) == "torch.nn.modules.linear.Linear"
