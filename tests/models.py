# SPDX-License-Identifier: Apache-2.0
"""Real Qwen3-MoE models with small shapes, and one training step of them as a value."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from activation_swap import SwapPolicy
from activation_swap._site import Site
from activation_swap.core.install import install as install_plan
from activation_swap.core.swap_plan import SwapPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from activation_swap.core.install import InstalledSwap
    from activation_swap.core.link import Links

__all__ = [
    "EVERYTHING",
    "MID",
    "TINY",
    "VERY_TINY",
    "Step",
    "build",
    "difference",
    "equal_bits",
    "forward",
    "gradients",
    "install",
    "plan",
    "step",
    "swapped",
    "tokens",
    "twins",
]

TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
}
"""Milliseconds per step on a CPU."""

VERY_TINY: Final = TINY | {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "vocab_size": 32,
}
"""For thousands of steps."""

MID: Final = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}
"""For one accelerator."""

EVERYTHING: Final = SwapPolicy(min_bytes=1, slab_bytes=64 * 1024)
"""Moves tensors of any size; small slabs, so that blocks lie over several of them."""


def build(
    shape: Mapping[str, Any] = TINY,
    *,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **changes: Any,
) -> Any:
    """Return a ``Qwen3MoeForCausalLM`` with weights drawn from ``seed``, in training mode."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**{**shape, "attn_implementation": attention, **changes})
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).to(device=device, dtype=dtype).train()


def tokens(model: Any, *, batch: int = 2, length: int = 10, seed: int = 1) -> torch.Tensor:
    """Return random ``int64[batch, length]`` on the model's device; every machine draws alike."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return drawn.to(model.device)


def plan(model: Any, policy: SwapPolicy = EVERYTHING) -> SwapPlan:
    """Return the plan that the registry makes of a model, without its checks."""
    return SwapPlan(
        sites=tuple(
            Site(
                fqn=f"model.layers.{index}.self_attn",
                module=layer.self_attn,
                owners=(model, model.model, layer),
                checkpoint_flag_owner=layer,
                returns=2,
            )
            for index, layer in enumerate(model.model.layers)
        ),
        policy=policy,
    )


def install(
    model: Any, policy: SwapPolicy = EVERYTHING, *, links: Links | None = None
) -> InstalledSwap:
    """Put a swap on a model; ``links`` is where tests put transfers of their own."""
    return install_plan(plan(model, policy), links=links)


@contextmanager
def swapped(
    model: Any, policy: SwapPolicy = EVERYTHING, *, links: Links | None = None
) -> Iterator[InstalledSwap]:
    """Put a swap on a model for the length of a block."""
    installation = install(model, policy, links=links)
    try:
        yield installation
    finally:
        installation.remove()


def twins(shape: Mapping[str, Any] = TINY, **options: Any) -> tuple[Any, Any]:
    """Return two models of equal weights: one to stay plain, one to be swapped."""
    return build(shape, **options), build(shape, **options)


@dataclass
class Step:
    """Loss and gradients of one forward and backward."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def forward(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """Return the output of a training forward, the loss among it."""
    return model(input_ids=ids, **{"labels": ids, "use_cache": False, **options})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient by name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def step(model: Any, *batches: torch.Tensor, zero: bool = True, **options: Any) -> Step:
    """Train on batches without an update: gradients of several batches are summed."""
    if zero:
        model.zero_grad(set_to_none=True)
    losses = []
    for ids in batches:
        loss = forward(model, ids, **options).loss
        loss.backward()
        losses.append(loss.detach())
    return Step(torch.stack(losses), gradients(model))


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit. A NaN differs from everything."""
    # Of equal values, the sign of a zero alone can differ.
    same_type = one.dtype is other.dtype and one.shape == other.shape
    return same_type and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def difference(found: Step | Sequence[Step], expected: Step | Sequence[Step]) -> str | None:
    """Say where two runs differ in a bit, or ``None``. A NaN differs from everything."""
    if isinstance(found, Step):
        found = [found]
    if isinstance(expected, Step):
        expected = [expected]
    if len(found) != len(expected):
        return f"{len(found)} steps, not {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not equal_bits(one.loss, other.loss):
            return f"loss of step {number}: {one.loss} is not {other.loss}"
        if one.gradients.keys() != other.gradients.keys():
            return f"step {number} has other gradients: {one.gradients.keys()}"
        for name, gradient in one.gradients.items():
            if not equal_bits(gradient, other.gradients[name]):
                return f"gradient of {name} in step {number}"
    return None
