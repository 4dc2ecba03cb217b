# SPDX-License-Identifier: Apache-2.0
"""Refusals of a Qwen3-MoE model that is not as its Transformers release builds it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from activation_swap import Registry
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention
from activation_swap.errors import Reason
from tests.rejections.case import PIPELINE, ApplyCase, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def of_release(version: str) -> Registry:
    """Return a registry that takes the installed Transformers for another release."""
    return Registry([Qwen3MoeAttention(transformers_version=version)])


def release_case(reason: Reason, name: str, version: str) -> ApplyCase:
    return ApplyCase(reason, name, lambda model: Request(model=model, registry=of_release(version)))


def change_case(
    reason: Reason, name: str, change: Callable[[Any], object], *, pipelined: bool = False
) -> ApplyCase:
    """Change a model, then apply to it."""

    def arrange(model: Any) -> Request:
        change(model)
        return Request(model=model, setup=PIPELINE if pipelined else None)

    return ApplyCase(reason, name, arrange)


def patch_case(reason: Reason, name: str, patch: Callable[[pytest.MonkeyPatch], None]) -> ApplyCase:
    """Change a class of Transformers while apply runs."""

    @contextmanager
    def around() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as context:
            patch(context)
            yield

    return ApplyCase(reason, name, lambda model: Request(model=model, around=around))


def modeling() -> Any:
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    return modeling_qwen3_moe


def attention_class() -> Any:
    return modeling().Qwen3MoeAttention


def checkpointing_layer() -> Any:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return GradientCheckpointingLayer


def derive(module: Any) -> None:
    """Give a module a class of the user's."""
    module.__class__ = type("Mine", (type(module),), {"__module__": "my_model"})


def imitate(module: Any) -> None:
    """Give a module a class that only looks like its own, as an import hook would leave it."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})


def derive_attention(model: Any) -> None:
    for layer in model.model.layers:
        derive(layer.self_attn)


def drop_flags(model: Any) -> None:
    for part in (model.model, *model.model.layers):
        part.gradient_checkpointing = None


def call_attention_through_a_list(model: Any) -> None:
    layer = model.model.layers[0]
    attention = layer.self_attn
    del layer.self_attn
    layer.self_attn = [attention]


def move_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.attention = layer.self_attn
        del layer.self_attn


def replace_layers(model: Any, container: nn.Module) -> None:
    model.model.layers = container


def swap_layers(model: Any) -> None:
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([second, first])


def rotate_layers(model: Any) -> None:
    """Put the first of four layers last."""
    model.config.num_hidden_layers = 4
    model.config.layer_types = ["full_attention"] * 4
    cls = type(model.model.layers[0])
    model.model.layers = nn.ModuleList([cls(model.config, index) for index in (1, 2, 3, 0)])


def forget_indices(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.layer_idx = None


def forward_of_a_user(
    self: Any,
    hidden_states: Any,
    position_embeddings: Any,
    attention_mask: Any,
    cache: Any = None,
    *,
    window: int = 0,
    **kwargs: Any,
) -> Any:
    """Take one parameter more than Transformers."""
    raise NotImplementedError(self, hidden_states, position_embeddings, attention_mask, window)


def hook_of_accelerate(model: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model.model.layers[0].self_attn, ModelHook())


def old_site(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpointing_layer(), "__call__", nn.Module.__call__)


def no_known_site(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(checkpointing_layer(), "__init_subclass__")


MODEL_CASES = (
    release_case(Reason.VERSION_TOO_OLD, "release-too-old", "4.50.3"),
    release_case(Reason.VERSION_UNREADABLE, "release-unreadable", "main-2025-07"),
    change_case(
        Reason.MISSING_PART,
        "layer-without-attention",
        lambda model: setattr(model.model.layers[1], "self_attn", None),
    ),
    change_case(Reason.MISSING_PART, "attention-moved", move_attention),
    change_case(Reason.MISSING_PART, "attention-is-no-module", call_attention_through_a_list),
    change_case(Reason.MISSING_PART, "model-without-body", lambda model: delattr(model, "model")),
    change_case(
        Reason.MISSING_PART,
        "layers-removed",
        lambda model: setattr(model.model, "layers", None),
        pipelined=True,
    ),
    change_case(
        Reason.MISSING_PART,
        "placeholder-outside-of-a-pipeline",
        lambda model: model.model.layers._modules.update({"0": None}),
    ),
    change_case(Reason.FOREIGN_CLASS, "body-of-a-user", lambda model: derive(model.model)),
    change_case(
        Reason.FOREIGN_CLASS, "layer-of-a-user", lambda model: derive(model.model.layers[0])
    ),
    change_case(
        Reason.FOREIGN_CLASS,
        "attention-of-a-user",
        derive_attention,
    ),
    change_case(
        Reason.FOREIGN_CLASS,
        "attention-of-the-same-name",
        lambda model: imitate(model.model.layers[1].self_attn),
    ),
    patch_case(
        Reason.FOREIGN_CLASS,
        "attention-class-gone-from-its-module",
        lambda patch: patch.delattr(modeling(), "Qwen3MoeAttention"),
    ),
    change_case(
        Reason.MISSING_PART,
        "identity-outside-of-a-pipeline",
        lambda model: model.model.layers._modules.update({"1": nn.Identity()}),
    ),
    change_case(
        Reason.LAYER_CONTAINER,
        "layers-in-a-sequential",
        lambda model: replace_layers(model, nn.Sequential(*model.model.layers)),
    ),
    change_case(
        Reason.LAYER_CONTAINER,
        "layers-in-a-dict-outside-of-a-pipeline",
        lambda model: replace_layers(
            model, nn.ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})
        ),
    ),
    change_case(
        Reason.LAYER_CONTAINER,
        "layers-in-a-sequential-of-a-pipeline",
        lambda model: replace_layers(model, nn.Sequential()),
        pipelined=True,
    ),
    change_case(
        Reason.LAYER_COUNT, "layer-dropped", lambda model: model.model.layers.__delitem__(1)
    ),
    change_case(Reason.LAYER_INDEX, "layers-out-of-order", swap_layers),
    change_case(Reason.LAYER_INDEX, "layers-out-of-order-in-a-stage", swap_layers, pipelined=True),
    change_case(
        Reason.LAYER_INDEX,
        "layer-index-repeated-in-a-stage",
        lambda model: setattr(model.model.layers[1].self_attn, "layer_idx", 0),
        pipelined=True,
    ),
    change_case(
        Reason.LAYER_INDEX,
        "layer-index-missing",
        lambda model: delattr(model.model.layers[1].self_attn, "layer_idx"),
        pipelined=True,
    ),
    change_case(Reason.LAYER_INDEX, "layer-indices-missing", forget_indices, pipelined=True),
    change_case(Reason.LAYER_INDEX, "layers-rotated", rotate_layers),
    release_case(Reason.ATTENTION_SIGNATURE, "signature-of-a-newer-release", "5.23.0"),
    release_case(Reason.ATTENTION_SIGNATURE, "everything-of-an-older-release", "4.52.4"),
    patch_case(
        Reason.ATTENTION_SIGNATURE,
        "signature-with-one-parameter-more",
        lambda patch: patch.setattr(attention_class(), "forward", forward_of_a_user),
    ),
    change_case(
        Reason.ATTENTION_PARTS,
        "attention-without-norm",
        lambda model: setattr(model.model.layers[0].self_attn, "q_norm", nn.Identity()),
    ),
    change_case(
        Reason.ATTENTION_PARTS,
        "attention-without-projection",
        lambda model: delattr(model.model.layers[1].self_attn, "o_proj"),
    ),
    change_case(
        Reason.MISPLACED_ATTENTION,
        "second-attention-in-a-layer",
        lambda model: setattr(
            model.model.layers[0], "cross_attn", attention_class()(model.config, layer_idx=0)
        ),
    ),
    patch_case(Reason.CHECKPOINT_SITE, "checkpoint-site-of-an-older-release", old_site),
    patch_case(Reason.CHECKPOINT_SITE, "checkpoint-site-unknown", no_known_site),
    change_case(
        Reason.CHECKPOINT_FLAG,
        "checkpoint-flag-of-the-layer-gone",
        lambda model: setattr(model.model.layers[0], "gradient_checkpointing", None),
    ),
    change_case(
        Reason.CHECKPOINT_FLAG,
        "checkpoint-flag-gone",
        drop_flags,
    ),
    change_case(Reason.REPLACED_FORWARD, "forward-of-accelerate", hook_of_accelerate),
    change_case(
        Reason.REPLACED_FORWARD,
        "forward-of-a-user",
        lambda model: setattr(
            model.model.layers[1].self_attn,
            "forward",
            forward_of_a_user.__get__(model.model.layers[1].self_attn),
        ),
    ),
    change_case(
        Reason.QUANTIZED_MODEL,
        "model-quantized",
        lambda model: setattr(model, "hf_quantizer", nn.Identity()),
    ),
)
