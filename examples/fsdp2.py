# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on several processes: shard the model, and apply the swap before or after.

Run it with::

    torchrun --nproc-per-node=2 examples/fsdp2.py

Each process takes an accelerator of its own, where there are any, and the CPU elsewhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from activation_swap import registry

STEPS = 3


def main() -> None:
    """Train a few steps; the first process prints what moved."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    dist.init_process_group()
    if accelerator is not None:
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).to(device).train()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    swap = registry.apply("attention", model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (2, 1024), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = swap.stats()
        swap.reset_stats()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {loss.item():.4f}, {stats.offloaded_bytes / 2**20:.1f} MiB "
                f"out, {stats.reloaded_bytes / 2**20:.1f} MiB back"
            )
    swap.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
