# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own on one device: one call before it, nothing inside it.

Run it with::

    python examples/plain_loop.py

It takes the accelerator if there is one. Models come from a configuration with random weights;
with a checkpoint it is ``Qwen3MoeForCausalLM.from_pretrained(...)`` instead.
"""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from activation_swap import registry

STEPS = 3


def main() -> None:
    """Train a few steps, and print what moved."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    swap = registry.apply("attention", model)

    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (2, 1024), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = swap.stats()
        swap.reset_stats()
        print(
            f"step {step}: loss {loss.item():.4f}, {stats.offloaded_bytes / 2**20:.1f} MiB out, "
            f"{stats.reloaded_bytes / 2**20:.1f} MiB back, {stats.reload_misses} reload misses"
        )

    swap.remove()


if __name__ == "__main__":
    main()
