# SPDX-License-Identifier: Apache-2.0
"""Model shapes by name, as fields of the Hugging Face configuration."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PRESETS"]

_TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
}

# The published config.json of Qwen/Qwen3-30B-A3B.
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"tiny": MappingProxyType(_TINY), "qwen3-30b-a3b": MappingProxyType(_QWEN3_30B_A3B)}
)
"""``tiny``: 5 million weights, byte vocabulary, one dense and three MoE layers; at 2,048 tokens a
step and fp32 each storage that attention saves is at least 1 MiB. ``qwen3-30b-a3b``: the public
30-billion-weight shape."""
