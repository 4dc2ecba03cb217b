# SPDX-License-Identifier: Apache-2.0
"""The tiny real Qwen3-MoE that every combination trains, and its batches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = ["LAYERS", "VOCABULARY", "batch", "tiny_config", "tiny_model"]

LAYERS = 4
# So many that a step's peak comes with the loss, after the last attention, also when attention is
# swapped: that moment does not depend on when communication frees its buffers.
VOCABULARY = 192


def tiny_config(**changes: Any) -> Qwen3MoeConfig:
    """Return a configuration whose activations outweigh its weights."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    return Qwen3MoeConfig(**(values | changes))


def tiny_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen3MoeForCausalLM:
    """Build the model; every call and every rank gets the same weights."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(tiny_config(**changes)).to(dtype).train()


def batch(seed: int, *, rows: int = 2, sequence: int = 40) -> dict[str, torch.Tensor]:
    """Draw tokens ``int64[rows, sequence]``, which are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, sequence), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
