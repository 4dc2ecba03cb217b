# SPDX-License-Identifier: Apache-2.0
"""Refusals of sound models in an unsound state: compiled, recomputed, hooked, owned, on meta."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.errors import Reason
from tests.rejections.case import PIPELINE, ApplyCase, Request
from tests.rejections.model_cases import change_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


def around_case(
    reason: Reason, name: str, around: Callable[[], AbstractContextManager[Any]]
) -> ApplyCase:
    return ApplyCase(reason, name, lambda model: Request(model=model, around=around))


def patched(target: str, value: object) -> Callable[[], AbstractContextManager[None]]:
    """Make torch say what cannot be brought about here."""

    @contextmanager
    def around() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(target, lambda: value)
            if target.startswith("torch.cuda"):
                context.setattr("torch.cuda.is_available", lambda: True)
            yield

    return around


class Packer:
    """A pack hook that is an object, without a name of its own."""

    def __repr__(self) -> str:
        return "Packer()"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def checkpointing(model: Any, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(**arguments)


def wrap(owner: Any, name: str, *, offload: bool = False) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
        offload_wrapper,
    )

    wrapper = offload_wrapper if offload else checkpoint_wrapper
    setattr(owner, name, wrapper(getattr(owner, name)))


def composable(module: nn.Module) -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint

    checkpoint(module)


def compile_forward(module: Any) -> None:
    module.forward = torch.compile(module.forward)


def compile_layer(model: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0])


def swapped_with_a_policy(model: Any) -> Request:
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=7))
    return Request(model=model, policy=SwapPolicy())


def swapped_in_a_pipeline(model: Any) -> Request:
    registry.apply("attention", model, setup=PIPELINE)
    return Request(model=model, setup=TrainingSetup())


def swapped_in_part(model: Any) -> Request:
    registry.apply("attention", model, setup=PIPELINE)
    last = type(model)(model.config)
    last.model.layers[0] = nn.Identity()
    last.model.layers[1] = model.model.layers[1]
    return Request(model=last, setup=PIPELINE)


def without_layers(model: Any) -> Request:
    model.config.num_hidden_layers = 0
    model.model.layers = nn.ModuleList()
    return Request(model=model)


SITE_CASES = (
    ApplyCase(Reason.ALREADY_SWAPPED, "swapped-with-another-policy", swapped_with_a_policy),
    ApplyCase(Reason.ALREADY_SWAPPED, "swapped-with-another-setup", swapped_in_a_pipeline),
    ApplyCase(Reason.ALREADY_SWAPPED, "swapped-in-part", swapped_in_part),
    ApplyCase(
        Reason.COMPILED_MODEL,
        "compiled-by-torch-compile",
        lambda model: Request(model=torch.compile(model)),
    ),
    change_case(Reason.COMPILED_MODEL, "compiled-in-place", lambda model: model.compile()),
    change_case(Reason.COMPILED_MODEL, "compiled-body", lambda model: model.model.compile()),
    change_case(
        Reason.COMPILED_MODEL, "compiled-layer", lambda model: model.model.layers[1].compile()
    ),
    change_case(Reason.COMPILED_MODEL, "compiled-layer-object", compile_layer),
    change_case(
        Reason.COMPILED_MODEL,
        "compiled-attention-forward",
        lambda model: compile_forward(model.model.layers[0].self_attn),
    ),
    change_case(
        Reason.COMPILED_MODEL,
        "compiled-projection",
        lambda model: model.model.layers[0].self_attn.q_proj.compile(),
    ),
    change_case(Reason.CHECKPOINTING_ON, "checkpointing-on", checkpointing),
    change_case(
        Reason.CHECKPOINTING_ON,
        "checkpointing-on-every-second-layer",
        lambda model: checkpointing(model, every_n_layers=2),
    ),
    change_case(
        Reason.CHECKPOINT_WRAPPER,
        "checkpoint-wrapper-on-a-layer",
        lambda model: wrap(model.model.layers, "1"),
    ),
    change_case(
        Reason.CHECKPOINT_WRAPPER,
        "checkpoint-wrapper-on-attention",
        lambda model: wrap(model.model.layers[0], "self_attn"),
    ),
    change_case(
        Reason.CHECKPOINT_WRAPPER,
        "checkpoint-wrapper-on-the-body",
        lambda model: wrap(model, "model"),
    ),
    change_case(
        Reason.CHECKPOINT_WRAPPER,
        "offload-wrapper-on-a-layer",
        lambda model: wrap(model.model.layers, "0", offload=True),
    ),
    change_case(
        Reason.CHECKPOINT_WRAPPER,
        "composable-checkpoint-on-a-layer",
        lambda model: composable(model.model.layers[0]),
    ),
    ApplyCase(Reason.META_DEVICE, "model-on-meta", lambda model: Request(model=model.to("meta"))),
    around_case(Reason.AMBIENT_SAVED_TENSOR_HOOKS, "inside-save-on-cpu", save_on_cpu),
    around_case(
        Reason.AMBIENT_SAVED_TENSOR_HOOKS,
        "inside-saved-tensor-hooks",
        lambda: saved_tensors_hooks(torch.clone, torch.clone),
    ),
    around_case(
        Reason.AMBIENT_SAVED_TENSOR_HOOKS,
        "inside-saved-tensor-hooks-of-an-object",
        lambda: saved_tensors_hooks(Packer(), Packer()),
    ),
    around_case(
        Reason.AMBIENT_SAVED_TENSOR_HOOKS,
        "saved-tensor-hooks-disabled",
        lambda: disable_saved_tensors_hooks("a transform forbids hooks"),
    ),
    around_case(
        Reason.TRACED, "inside-a-compilation", patched("torch.compiler.is_compiling", value=True)
    ),
    around_case(Reason.TRACED, "inside-a-jit-trace", patched("torch.jit.is_tracing", value=True)),
    around_case(
        Reason.TRACED,
        "inside-a-cuda-graph",
        patched("torch.cuda.is_current_stream_capturing", value=True),
    ),
    ApplyCase(
        Reason.REPEATED_MODULE,
        "one-stage-twice",
        lambda model: Request(model=[model, model], setup=PIPELINE),
    ),
    ApplyCase(Reason.NO_ATTENTION, "model-without-layers", without_layers),
)
