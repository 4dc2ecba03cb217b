# SPDX-License-Identifier: Apache-2.0
"""What cannot be combined, refused by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad

from activation_swap import TrainingSetup, registry
from activation_swap.errors import Reason
from tests.compose.combination import Combination
from tests.compose.run import Run
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS"]


def swapped() -> Any:
    model, run = tiny_model(), Run.swapped()
    run.apply(model)
    # The hooks on the model hold the swap.
    return model


def apply_to_compiled(compile_: Callable[[Any], Any]) -> None:
    registry.apply("attention", compile_(tiny_model()))


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compile_later(compile_: Callable[[Any], Any]) -> None:
    compile_(swapped())(**batch(0))


def ask_for_compile() -> None:
    registry.apply("attention", tiny_model(), setup=TrainingSetup(compile=True))


def apply_inside_transform() -> None:
    model = tiny_model()

    def loss(_: torch.Tensor) -> torch.Tensor:
        registry.apply("attention", model)
        return torch.zeros(())

    grad(loss)(torch.zeros(()))


def transform_later() -> None:
    model = swapped()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        value: torch.Tensor = functional_call(model, weights, (), batch(0)).loss
        return value

    grad(loss)(weights)


def apply_to_data_parallel() -> None:
    registry.apply("attention", nn.DataParallel(tiny_model()))


def replicate_later() -> None:
    model = swapped()
    replica = model.model.layers[0].self_attn._replicate_for_data_parallel()
    replica(torch.zeros(1, 2, 32), position_embeddings=None, attention_mask=None)


_EAGER = partial(torch.compile, backend="eager")


def _combinations() -> Iterator[Combination]:
    cases: dict[str, tuple[str, Callable[[], None], Reason]] = {
        "torch.compile(model), then apply": (
            "torch.compile",
            partial(apply_to_compiled, _EAGER),
            Reason.COMPILED_MODEL,
        ),
        "model.compile(), then apply": (
            "torch.compile",
            partial(apply_to_compiled, compile_in_place),
            Reason.COMPILED_MODEL,
        ),
        "apply, then torch.compile(model)": (
            "torch.compile",
            partial(compile_later, _EAGER),
            Reason.COMPILED_LATER,
        ),
        "apply, then model.compile()": (
            "torch.compile",
            partial(compile_later, compile_in_place),
            Reason.COMPILED_LATER,
        ),
        "TrainingSetup(compile=True)": (
            "torch.compile",
            ask_for_compile,
            Reason.COMPILE_REQUESTED,
        ),
        "apply inside of torch.func.grad": (
            "torch.func",
            apply_inside_transform,
            Reason.AMBIENT_SAVED_TENSOR_HOOKS,
        ),
        "torch.func.grad of a swapped model": (
            "torch.func",
            transform_later,
            Reason.HOOKS_DISABLED,
        ),
        "the wrapper passed to apply": (
            "DataParallel",
            apply_to_data_parallel,
            Reason.UNSUPPORTED_WRAPPER,
        ),
        "apply, then wrap; the call of a replica": (
            "DataParallel",
            replicate_later,
            Reason.SHALLOW_COPY,
        ),
    }
    for name, (tool, check, reason) in cases.items():
        yield Combination(tool=tool, name=name, check=check, refused=reason)
    yield Combination(
        tool="CUDA graphs",
        name="capture of a swapped model",
        remark="refused as AS606 GRAPH_CAPTURE; only a GPU captures: make gpu-test runs it",
    )


COMBINATIONS = tuple(_combinations())
