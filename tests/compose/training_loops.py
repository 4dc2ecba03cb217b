# SPDX-License-Identifier: Apache-2.0
"""What training loops do around the plain step: generate, evaluate, copy, step in backward."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS"]


def generate(model: Any, step: int) -> torch.Tensor:
    """Sample as a rollout does, in eval mode and with a cache."""
    model.eval()
    prompt = batch(step, rows=2, sequence=6)["input_ids"]
    tokens: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=5,
        do_sample=True,
        pad_token_id=0,
    )
    model.train()
    return tokens


def evaluate(model: Any, step: int) -> torch.Tensor:
    """Compute a loss without gradients, in both ways."""
    model.eval()
    with torch.no_grad():
        first = model(**batch(50 + step)).loss
    with torch.inference_mode():
        second = model(**batch(60 + step)).loss
    model.train()
    return torch.stack((first, second.clone()))


def train(run: Run, *, between: Callable[[Any, int], torch.Tensor]) -> None:
    """Train with something between the steps, and once between a forward and its backward."""
    model = tiny_model()
    run.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        torch.manual_seed(step)
        run.keep(f"{step}.between", between(model, step).float())
        with run.step():
            loss = model(**batch(step)).loss
            run.keep(f"{step}.inside", between(model, step).float())
            loss.backward()
            run.record(model, loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def train_with_reference(run: Run) -> None:
    """Train against a frozen deep copy of the swapped model."""
    model = tiny_model()
    run.apply(model)
    reference = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        with run.step():
            with torch.no_grad():
                expected = reference(**batch(step)).logits
            logits = model(**batch(step)).logits
            loss = (logits.log_softmax(-1) - expected.log_softmax(-1)).square().mean()
            loss = loss + model(**batch(step + 70)).loss
            loss.backward()
            run.record(model, loss)
            del loss, logits
        optimizer.step()
        optimizer.zero_grad()


def step_in_backward(run: Run) -> None:
    """Apply and free each gradient as soon as it is complete."""
    model = tiny_model()
    run.apply(model)

    def apply(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-2)  # type: ignore[arg-type] # it was just made
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(apply)
    for step in range(run.steps):
        with run.step():
            loss = model(**batch(step)).loss
            loss.backward()
            run.record(model, loss)
            del loss
        for name, weight in model.named_parameters():
            run.keep(f"{step}.{name}", weight)


def _combinations() -> Iterator[Combination]:
    scenarios: dict[str, tuple[Callable[[Run], None], str]] = {
        "generate between forward and backward": (partial(train, between=generate), ""),
        "no_grad and inference_mode between forward and backward": (
            partial(train, between=evaluate),
            "",
        ),
        "a deep copy as reference model, two forwards, one backward": (
            train_with_reference,
            "a copy is not swapped",
        ),
        "optimizer step in backward": (step_in_backward, ""),
    }
    for name, (scenario, remark) in scenarios.items():
        yield Combination(
            tool="Training loop",
            name=name,
            check=partial(compare, scenario),
            remark=remark,
        )


COMBINATIONS = tuple(_combinations())
