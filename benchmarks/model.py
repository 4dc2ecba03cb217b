# SPDX-License-Identifier: Apache-2.0
"""The model that the benchmarks train: a preset's shape, seeded random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from activation_swap.trainer.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["build", "cut"]

_STANDARD_DEVIATION: Final = 0.02


def build(shape: str, *, device: str, layers: int | None = None, seed: int = 0) -> Any:
    """Build ``Qwen3MoeForCausalLM`` in bf16 with SDPA, in training mode.

    Weights are drawn on the device, so that 61 GB need neither a download nor the host's memory.

    Args:
        shape: A preset of the reference trainer.
        device: Where the weights are.
        layers: Number of decoder layers. (Default: the preset's)
        seed: Of the weights: normal with deviation 0.02, norms are 1.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - slow to import
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    fields = {**PRESETS[shape], "use_cache": False, "attn_implementation": "sdpa"}
    del fields["model_type"]
    if layers is not None:
        fields["num_hidden_layers"] = layers
    config = Qwen3MoeConfig(**fields)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), no_init_weights():
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
    return model.train()


def cut(model: Any, layers: int) -> None:
    """Drop the decoder layers from number ``layers`` on: building 48 takes longer than cutting."""
    decoder = model.model
    if layers > len(decoder.layers):
        message = f"a model of {len(decoder.layers)} layers cannot be cut to {layers}"
        raise ValueError(message)
    decoder.layers = decoder.layers[:layers]
    model.config.num_hidden_layers = layers


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of everything that training changes."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
