# SPDX-License-Identifier: Apache-2.0
"""A pipeline of torch over several processes: the schedule decides when attention moves.

Run it with::

    torchrun --nproc-per-node=2 examples/pipeline.py

Each process takes an accelerator of its own, where there are any, and the CPU elsewhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from activation_swap import TrainingSetup, registry
from activation_swap.trainer.stage import Stage, prune

STEPS = 3
MICROBATCHES = 4


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each token from those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train a few steps; every process prints what its stage moved."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    dist.init_process_group()
    if accelerator is not None:
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2 * ranks,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    first, last = rank == 0, rank == ranks - 1
    whole = Qwen3MoeForCausalLM(config).to(device).train()
    model = prune(whole, range(2 * rank, 2 * rank + 2), first=first, last=last)
    stage = PipelineStage(Stage(model, first=first, last=last), rank, ranks, device)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=next_token_loss)

    swap = registry.apply("attention", model, setup=TrainingSetup(pp_size=ranks))
    swap.attach(schedule)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (MICROBATCHES, 1024), device=device)
        losses: list[torch.Tensor] = []
        schedule.step(*([tokens] if first else []), target=tokens if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        stats = swap.stats()
        swap.reset_stats()
        loss = f"loss {torch.stack(losses).mean():.3f}, " if last else ""
        print(
            f"step {step}, stage {rank}: {loss}{stats.offloaded_bytes} bytes out, "
            f"{stats.reload_misses} reload misses"
        )
    swap.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
