# SPDX-License-Identifier: Apache-2.0
"""Field cases on backward triggers and on the flow of a training loop: C24, C25, C27, C28."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.faults.harness import apply, at_base, batch, everything, model_for
from tests.models import (
    Step,
    build,
    difference,
    forward,
    gradients,
    step,
    tokens,
    twins,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("exact")


def on_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Change the attention's output in place, before the residual."""

    def prepare(layer: Any) -> None:
        layer.self_attn.register_forward_hook(
            lambda _, __, result: (change(result[0]), *result[1:])
        )

    return prepare


def on_input(layer: Any) -> None:
    """Change the attention's input in place, before the attention reads it."""
    layer.input_layernorm.register_forward_hook(lambda _, __, result: result.mul_(1.5))


def residual_in_place(layer: Any) -> None:
    """Add the residual into the attention's output, as memory-saving layers do."""
    residual: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: residual.append(args[0]))
    layer.self_attn.register_forward_hook(
        lambda _, __, result: (result[0].add_(residual.pop()), *result[1:])
    )


@pytest.mark.parametrize(
    "prepare",
    [
        on_output(lambda hidden: hidden.mul_(0.5)),
        on_output(lambda hidden: hidden.add_(1)),
        residual_in_place,
        on_input,
    ],
    ids=["scale-output", "shift-output", "residual", "scale-input"],
)
def test_c24_in_place_operations_run_as_without_swap(
    device: torch.device, prepare: Callable[[Any], None]
) -> None:
    plain, model = twins(device=device, attention="sdpa")
    # The hooks of the user come after ours, and before.
    for layer in plain.model.layers:
        prepare(layer)
    swap = apply(model, everything(device))
    for layer in model.model.layers:
        prepare(layer)
    ids = tokens(plain)
    assert difference(step(model, ids), step(plain, ids)) is None
    assert swap.stats().saved_bytes > 0


def lora_like(model: Any) -> None:
    """Leave only two projections of each attention trainable: layer 0's input has no grad."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
        layer.self_attn.v_proj.requires_grad_(True)


def last_attention(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[-1].self_attn.requires_grad_(True)


def first_attention(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[0].self_attn.requires_grad_(True)


def moe_only(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)


@pytest.mark.parametrize("freeze", [lora_like, first_attention, moe_only])
def test_c25_inputs_without_grad(device: torch.device, freeze: Callable[[Any], None]) -> None:
    plain, model = model_for(device), model_for(device)
    freeze(plain)
    freeze(model)
    expected = step(plain, batch(plain))
    swap = apply(model, everything(device))
    for _ in range(3):
        assert difference(step(model, batch(model)), expected) is None
        assert at_base(swap)
    assert expected.gradients
    assert swap.stats().saved_bytes > 0


@pytest.mark.filterwarnings("ignore:.*moved nothing:RuntimeWarning")
def test_c25_only_the_last_attention_trains(device: torch.device) -> None:
    """It is the one that stays by design; nothing before it saves anything."""
    plain, model = model_for(device), model_for(device)
    last_attention(plain)
    last_attention(model)
    expected = step(plain, batch(plain))
    swap = apply(model, everything(device))
    assert difference(step(model, batch(model)), expected) is None
    assert at_base(swap)


@pytest.mark.level0
@pytest.mark.filterwarnings("ignore:.*moved nothing:RuntimeWarning")
def test_c25_nothing_trainable() -> None:
    model = build().requires_grad_(False)
    swap = apply(model)
    assert not forward(model, tokens(model)).loss.requires_grad
    assert swap.stats().offloaded_bytes == 0
    assert at_base(swap)


def test_c27_passes_without_grad_use_nothing_up(device: torch.device) -> None:
    plain, model = model_for(device), model_for(device)
    ids = batch(plain)
    expected = step(plain, ids)
    swap = apply(model)
    for context in (torch.no_grad, torch.no_grad, torch.no_grad, torch.inference_mode):
        with context():
            forward(model, ids)
    assert swap.stats().offloaded_bytes == swap.stats().live_groups == 0
    moved = []
    for number in range(10):
        swap.reset_stats()
        assert difference(step(model, ids), expected) is None
        moved.append(swap.stats().offloaded_bytes)
        swap.reset_stats()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            forward(model, ids)
        assert swap.stats().offloaded_bytes == 0
    assert len(set(moved)) == 1
    model.eval()
    plain.eval()
    swap.reset_stats()
    assert difference(step(model, ids), step(plain, ids)) is None
    assert swap.stats().offloaded_bytes == moved[0] > 0


@pytest.mark.parametrize("router", [False, True], ids=["plain", "router-logits"])
def test_c28_generate_between_forward_and_backward(device: torch.device, *, router: bool) -> None:
    plain, model = twins(device=device, attention="sdpa", output_router_logits=router)
    prompt = tokens(plain, batch=1, length=4)

    def run(model: Any, swap: Any = None) -> tuple[Step, list[torch.Tensor]]:
        generated = []
        losses = []
        model.zero_grad(set_to_none=True)
        for _ in range(5):
            loss = forward(model, tokens(model)).loss
            if swap is not None:
                swap.reset_stats()
            generated.append(
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=8,
                    do_sample=False,
                    pad_token_id=0,
                    output_router_logits=False,
                )
            )
            if swap is not None:
                assert swap.stats().offloaded_bytes == swap.stats().reloaded_bytes == 0
            loss.backward()
            losses.append(loss.detach())
        return Step(torch.stack(losses), gradients(model)), generated

    expected, texts = run(plain)
    found, generated = run(model, apply(model, everything(device)))
    assert difference(found, expected) is None
    assert all(map(torch.equal, generated, texts))
