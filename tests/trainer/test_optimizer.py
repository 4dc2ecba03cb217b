# SPDX-License-Identifier: Apache-2.0
"""AdamW equals torch's, SGD inside backward equals SGD after it; both show every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from activation_swap.trainer.config import AdamWSection, SGDSection
from activation_swap.trainer.optimizer import AdamW, SGDInBackward, build_optimizer

pytestmark = pytest.mark.unit

SGD = SGDSection(name="sgd_in_backward", lr=0.1)


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.randn(5, 4)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_sgd_in_backward_equals_sgd_after_it() -> None:
    plain, x = model_and_input()
    inside, _ = model_and_input()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    fused = SGDInBackward(inside, SGD)
    for _ in range(3):
        plain(x).square().sum().backward()
        sgd.step()
        sgd.zero_grad()
        inside(x).square().sum().backward()
        fused.step()
    assert all(map(torch.equal, weights(plain), weights(inside)))


def test_sgd_in_backward_frees_each_gradient_at_once() -> None:
    model, x = model_and_input()
    optimizer = SGDInBackward(model, SGD)
    alive: list[int] = []
    optimizer.observer = lambda *_: alive.append(
        sum(parameter.grad is not None for parameter in model.parameters())
    )
    model(x).sum().backward()
    # Weight and bias of one layer come from one node of the graph.
    assert len(alive) == 4
    assert max(alive) <= 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_adamw_equals_torch() -> None:
    plain, x = model_and_input()
    ours, _ = model_and_input()
    section = AdamWSection(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    optimizer = AdamW(ours, section)
    for _ in range(3):
        plain(x).sum().backward()
        reference.step()
        reference.zero_grad()
        ours(x).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, weights(plain), weights(ours)))
    assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("section", [AdamWSection(), SGD], ids=lambda section: section.name)
def test_observer_sees_every_gradient_before_the_update(section: AdamWSection | SGDSection) -> None:
    plain, x = model_and_input()
    plain(x).sum().backward()
    model, _ = model_and_input()
    optimizer = build_optimizer(model, section)
    seen: dict[str, torch.Tensor] = {}
    optimizer.observer = lambda name, gradient: seen.update({name: gradient.clone()})
    model(x).sum().backward()
    optimizer.step()
    expected = dict(plain.named_parameters())
    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        assert torch.equal(gradient, torch.as_tensor(expected[name].grad))


def test_frozen_and_unused_weights_are_left_out() -> None:
    model, x = model_and_input()
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    model.get_parameter("0.bias").requires_grad_(False)
    optimizer = AdamW(model, AdamWSection())
    seen: list[str] = []
    optimizer.observer = lambda name, _: seen.append(name)
    model(x).sum().backward()
    optimizer.step()
    assert seen == ["0.weight", "2.weight", "2.bias"]
