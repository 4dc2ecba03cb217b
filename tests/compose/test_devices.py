# SPDX-License-Identifier: Apache-2.0
"""What the table cannot say on a CPU: the same comparisons on an accelerator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from activation_swap import SwapPolicy, registry
from activation_swap.errors import ActivationSwapError, Reason
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("exact")

# Heads that every kernel takes.
SHAPE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SEQUENCE = 128


def train(run: Run, *, device: torch.device, sharded: bool = False, **config: Any) -> None:
    model: Any = tiny_model(torch.bfloat16, **SHAPE, **config).to(device)
    run.apply(model)
    if sharded:
        mesh = init_device_mesh(device.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        tokens = {name: t.to(device) for name, t in batch(step, sequence=SEQUENCE).items()}
        with run.step():
            loss = model(**tokens).loss
            loss.backward()
            run.record(model, loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def one_rank(device: torch.device, tmp_path: Path) -> Iterator[torch.device]:
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/peers", rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_implementations(device: torch.device, kind: str) -> None:
    compare(partial(train, device=device, attn_implementation=kind))


@pytest.mark.level1
# The compiler takes a warning that raises, of its own or of the driver below it, for a crash.
@pytest.mark.filterwarnings("default")
def test_flex_attention() -> None:
    """Transformers compiles the kernel alone; what its backward needs is saved inside attention."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        pytest.skip("torch has no backward of flex attention on a CPU")
    compare(partial(train, device=device, attn_implementation="flex_attention"))


def test_fsdp2_on_one_rank(one_rank: torch.device) -> None:
    compare(partial(train, device=one_rank, sharded=True))


@pytest.mark.level1
def test_a_swapped_model_is_not_captured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("only a GPU captures")
    model = tiny_model().cuda()
    swap = registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    tokens = batch(0)["input_ids"].cuda()
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    with (
        pytest.raises(ActivationSwapError) as caught,
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"),
    ):
        model.model.layers[0].self_attn(
            hidden_states=torch.zeros(1, 4, 32, device="cuda"),
            position_embeddings=(torch.zeros(1, 4, 8, device="cuda"),) * 2,
            attention_mask=None,
        )
    assert caught.value.reason is Reason.GRAPH_CAPTURE
    swap.remove()
