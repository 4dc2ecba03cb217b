# SPDX-License-Identifier: Apache-2.0
"""Refusals of what was asked for: mode, set-up, policy, kind and class of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from activation_swap import SwapPolicy, TrainingSetup
from activation_swap.compat.canary import tiny_model
from activation_swap.errors import Reason
from tests.rejections.case import ApplyCase, Request


def foreign_cell() -> object:
    """Return an object as another framework's model looks: its class says where it is from."""
    return type("Cell", (), {"__module__": "mindspore.nn.cell"})()


def subclass(model: Any) -> Any:
    """Return a model of a class that a user derived."""
    return type("MyQwen3Moe", (type(model),), {"__module__": "my_model"})(model.config)


def another(family: str, head: str) -> Any:
    """Return a small model of another family; on the meta device, since only its class counts."""
    import transformers

    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = getattr(transformers, f"{family}Config")()
    text = getattr(config, "text_config", config)
    for name, value in shape.items():
        setattr(text, name, value)
    text.layer_types = ["full_attention"]
    with torch.device("meta"):
        return getattr(transformers, f"{family}For{head}")(config)


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


class Wrapper(nn.Module):
    """Any module with a model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model


def setup_case(reason: Reason, name: str, **fields: Any) -> ApplyCase:
    return ApplyCase(
        reason, name, lambda model: Request(model=model, setup=TrainingSetup(**fields))
    )


def policy_case(name: str, **fields: Any) -> ApplyCase:
    return ApplyCase(
        Reason.INVALID_POLICY,
        name,
        lambda model: Request(model=model, policy=SwapPolicy(**fields)),
    )


def family_case(name: str, family: str, head: str) -> ApplyCase:
    return ApplyCase(Reason.NO_ADAPTER, name, lambda _: Request(model=another(family, head)))


def mode_case(name: str, mode: Any) -> ApplyCase:
    return ApplyCase(Reason.UNKNOWN_MODE, name, lambda model: Request(model=model, mode=mode))


REQUEST_CASES = (
    mode_case("mode-of-other-case", "Attention"),
    mode_case("mode-of-another-name", "mlp"),
    mode_case("mode-empty", ""),
    mode_case("mode-true", True),
    mode_case("mode-none-object", None),
    mode_case("mode-number", 1),
    mode_case("mode-list", ["attention"]),
    ApplyCase(
        Reason.NOT_A_TORCH_MODULE, "model-of-mindspore", lambda _: Request(model=foreign_cell())
    ),
    ApplyCase(Reason.NOT_A_TORCH_MODULE, "model-is-a-path", lambda _: Request(model="Qwen3-30B")),
    ApplyCase(Reason.NOT_A_TORCH_MODULE, "model-is-nothing", lambda _: Request(model=None)),
    ApplyCase(
        Reason.NOT_A_TORCH_MODULE,
        "stage-is-not-a-module",
        lambda model: Request(model=[model, None], setup=TrainingSetup(pp_size=2)),
    ),
    setup_case(Reason.OTHER_BACKEND, "backend-mindspore", backend="mindspore"),
    setup_case(Reason.OTHER_BACKEND, "backend-of-other-case", backend="PyTorch"),
    ApplyCase(Reason.NO_ADAPTER, "model-without-head", lambda model: Request(model=model.model)),
    family_case("model-qwen3", "Qwen3", "CausalLM"),
    family_case("model-qwen3next", "Qwen3Next", "CausalLM"),
    family_case("model-qwen3vlmoe", "Qwen3VLMoe", "ConditionalGeneration"),
    family_case("model-qwen3omnimoe", "Qwen3OmniMoeThinker", "ConditionalGeneration"),
    family_case("model-qwen2moe", "Qwen2Moe", "CausalLM"),
    family_case("model-mixtral", "Mixtral", "CausalLM"),
    ApplyCase(
        Reason.SUBCLASSED_MODEL, "model-of-a-subclass", lambda model: Request(model=subclass(model))
    ),
    ApplyCase(Reason.WRAPPED_MODEL, "model-in-peft", lambda model: Request(model=lora(model))),
    ApplyCase(
        Reason.WRAPPED_MODEL, "model-in-a-wrapper", lambda model: Request(model=Wrapper(model))
    ),
    ApplyCase(
        Reason.WRAPPED_MODEL,
        "model-in-two-wrappers",
        lambda model: Request(model=Wrapper(Wrapper(model))),
    ),
    ApplyCase(
        Reason.WRAPPED_MODEL,
        "stages-in-a-module-list",
        lambda model: Request(model=nn.ModuleList([model])),
    ),
    ApplyCase(
        Reason.UNSUPPORTED_WRAPPER,
        "model-in-data-parallel",
        lambda model: Request(model=nn.DataParallel(model)),
    ),
    ApplyCase(Reason.NO_STAGE, "no-stage", lambda _: Request(model=())),
    ApplyCase(
        Reason.STAGES_WITHOUT_PIPELINE,
        "two-stages-without-pipeline",
        lambda model: Request(model=[model, tiny_model()]),
    ),
    setup_case(Reason.COMPILE_REQUESTED, "setup-compile", compile=True),
    setup_case(Reason.CHECKPOINT_REQUESTED, "setup-checkpoint-full", activation_checkpoint="full"),
    ApplyCase(
        Reason.INVALID_SETUP,
        "setup-is-a-dict",
        lambda model: Request(model=model, setup={"pp_size": 1}),
    ),
    setup_case(Reason.INVALID_SETUP, "setup-pp-size-zero", pp_size=0),
    setup_case(Reason.INVALID_SETUP, "setup-pp-size-true", pp_size=True),
    setup_case(Reason.INVALID_SETUP, "setup-pp-size-text", pp_size="2"),
    setup_case(Reason.INVALID_SETUP, "setup-compile-text", compile="no"),
    setup_case(Reason.INVALID_SETUP, "setup-backend-none", backend=None),
    setup_case(Reason.INVALID_SETUP, "setup-checkpoint-none", activation_checkpoint=None),
    ApplyCase(
        Reason.INVALID_POLICY, "policy-is-a-number", lambda m: Request(model=m, policy=1 << 20)
    ),
    policy_case("policy-min-bytes-negative", min_bytes=-1),
    policy_case("policy-min-bytes-true", min_bytes=True),
    policy_case("policy-min-coverage-above-one", min_coverage=1.5),
    policy_case("policy-min-coverage-negative", min_coverage=-0.1),
    policy_case("policy-min-coverage-true", min_coverage=True),
    policy_case("policy-keep-last-number", keep_last=1),
    policy_case("policy-narrow-text", narrow="yes"),
    policy_case("policy-fraction-zero", fraction=0.0),
    policy_case("policy-fraction-above-one", fraction=1.5),
    policy_case("policy-slab-bytes-tiny", slab_bytes=256),
    policy_case("policy-slab-bytes-zero", slab_bytes=0),
    policy_case("policy-slab-bytes-odd", slab_bytes=3 << 20),
    policy_case("policy-max-host-bytes-negative", max_host_bytes=-1),
    policy_case("policy-max-host-bytes-true", max_host_bytes=True),
    policy_case("policy-max-host-bytes-below-slab", max_host_bytes=32 << 20),
)
