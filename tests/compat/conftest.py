"""A tiny real Qwen3-MoE, and one training step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

ModelFactory = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def equals(self, other: Step) -> bool:
        """Whether every bit is the same."""
        return (
            torch.equal(self.loss, other.loss)
            and self.gradients.keys() == other.gradients.keys()
            and all(torch.equal(g, other.gradients[name]) for name, g in self.gradients.items())
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> ModelFactory:
    """Build the model: the same arguments give the same weights."""

    def make(*, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        shape = {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_implementation": attention,
        }
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | changes)))
        return model.to(dtype).train()

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    """Token ids [B=2, S=16]."""
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def train_step(tokens: torch.Tensor) -> Callable[..., Step]:
    """Run forward and backward once and take the gradients off the model."""

    def step(model: Any, **arguments: Any) -> Step:
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False, **arguments).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return Step(loss.detach(), gradients)

    return step
