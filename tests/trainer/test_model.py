# SPDX-License-Identifier: Apache-2.0
"""Models from presets, directories and JSON files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3MoeForCausalLM

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.config import ModelSection
from activation_swap.trainer.model import _SIZES, build_model, read_model_config, reading_model
from activation_swap.trainer.presets import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 8}


def build(seed: int = 0, **values: Any) -> Any:
    return build_model(ModelSection(**values), device=CPU, seed=seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_has_the_dtype(dtype: str) -> None:
    model = build(dtype=dtype, overrides=SMALL)
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert model.training


def test_seed_alone_decides_the_weights() -> None:
    one, same, other = (build(seed, overrides=SMALL).lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_weights_are_drawn_where_they_stay() -> None:
    model: Any = build_model(
        ModelSection(source="qwen3-30b-a3b"), device=torch.device("meta"), seed=0
    )
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert 30.4e9 < sum(weight.numel() for weight in model.parameters()) < 30.6e9


def test_30b_preset_is_the_public_configuration() -> None:
    config = CONFIG_MAPPING["qwen3_moe"].from_dict(dict(PRESETS["qwen3-30b-a3b"]))
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (48, 2048, 128)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 4)
    assert (config.num_experts, config.num_experts_per_tok) == (128, 8)
    assert (config.moe_intermediate_size, config.vocab_size) == (768, 151936)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.norm_topk_prob is True


def test_tiny_preset_has_storages_worth_moving() -> None:
    """At the default batch each storage that attention saves in fp32 is at least 1 MiB."""
    tiny = PRESETS["tiny"]
    narrowest = tiny["num_key_value_heads"] * tiny["head_dim"]
    assert 2 * 1024 * narrowest * 4 >= 1 << 20
    assert 0 in tiny["mlp_only_layers"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_implementations_are_passed_on(attention: str) -> None:
    model = build(
        overrides=SMALL, attn_implementation=attention, experts_implementation="batched_mm"
    )
    assert model.config._attn_implementation == attention
    assert model.config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("as_directory", [True, False], ids=["directory", "file"])
def test_hugging_face_configuration(as_directory: bool, tmp_path: Path) -> None:  # noqa: FBT001
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PRESETS["tiny"], **SMALL}))
    model = build(source=str(tmp_path if as_directory else path), overrides={"vocab_size": 300})
    assert type(model) is Qwen3MoeForCausalLM
    assert model.config.vocab_size == 300
    assert model.config.hidden_size == 32


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model_type": "no_such_model"}'],
    ids=["empty", "cut off", "no mapping", "no type", "unknown type"],
)
def test_unreadable_configuration_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RejectedError) as caught:
        build(source=str(path))
    assert caught.value.reason is Reason.UNREADABLE_MODEL
    assert "qwen3-30b-a3b" in caught.value.expected


def test_override_of_the_wrong_type_is_rejected() -> None:
    with pytest.raises(RejectedError, match="'hidden_size' expected int") as caught:
        build(overrides={"hidden_size": "wide"})
    assert caught.value.reason is Reason.UNREADABLE_MODEL


@pytest.mark.parametrize("groups", [0, 3])
def test_heads_that_do_not_share_evenly_are_rejected(groups: int) -> None:
    overrides = {"num_attention_heads": 4, "num_key_value_heads": groups}
    with pytest.raises(RejectedError, match=f"4 attention heads cannot share {groups}") as caught:
        build(overrides=overrides)
    assert caught.value.reason is Reason.UNREADABLE_MODEL


TWO_LAYERS = SMALL | {"num_hidden_layers": 2}  # the second has experts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in _SIZES),
        *((name, -2) for name in _SIZES),
        ("num_experts", 1),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 99),
        ("attention_dropout", 2),
        ("attention_dropout", -0.5),
        ("initializer_range", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("pad_token_id", 999),
        ("return_dict", False),
        ("vocab_size", 10**30),
    ],
)
def test_value_that_makes_up_no_model_is_rejected(name: str, value: float) -> None:
    with pytest.raises(RejectedError) as caught:
        build(overrides={**TWO_LAYERS, name: value})
    assert caught.value.reason is Reason.UNREADABLE_MODEL
    assert name in str(caught.value.where)
    assert "a preset" not in caught.value.expected


def test_all_values_that_make_up_no_model_are_named() -> None:
    with pytest.raises(RejectedError, match=r"head_dim is 0, .*dropout is 2, .*") as caught:
        read_model_config(ModelSection(overrides={"head_dim": 0, "attention_dropout": 2}))
    assert caught.value.reason is Reason.UNREADABLE_MODEL


@pytest.mark.parametrize("overrides", [{"attention_dropout": 0.5}, {"num_experts": 0}], ids=str)
def test_value_that_makes_up_a_model(overrides: dict[str, Any]) -> None:
    assert build(overrides={**TWO_LAYERS, **overrides}).training


def test_trial_draws_no_number() -> None:
    build(overrides={**TWO_LAYERS, "attention_dropout": 0.5})
    after = torch.get_rng_state()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        read_model_config(ModelSection(overrides={**TWO_LAYERS, "attention_dropout": 0.5}))
    )
    assert torch.equal(after, torch.get_rng_state())


def test_memory_that_runs_out_is_not_the_configurations_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError), reading_model(ModelSection()):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("preset", PRESETS)
def test_override_of_no_field_is_rejected(preset: str) -> None:
    section = ModelSection(
        source=preset, overrides={"hidden_sise": 8, "layers": 1, "vocab_size": 9}
    )
    with pytest.raises(RejectedError, match=r"Qwen3MoeConfig has no hidden_sise, layers") as caught:
        read_model_config(section)
    assert caught.value.reason is Reason.UNREADABLE_MODEL


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_experts": 16},  # by another name in the class
        {"rope_theta": 5e5},  # the class makes something else of it
        {"use_cache": False},
        {"head_dim": 8},  # the model reads it, the class does not declare it
        {"initializer_range": 0.5, "tie_word_embeddings": True},
        {"of_its_makers": 2},  # in the source
    ],
    ids=str,
)
def test_override_of_a_field(overrides: dict[str, Any], tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_moe", "of_its_makers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(ModelSection(source=str(tmp_path), overrides=overrides))
    if "of_its_makers" in overrides:
        assert config.of_its_makers == 2


@pytest.mark.parametrize(
    ("fields", "values", "found"),
    [
        ({"model_type": "vit"}, {}, "Unrecognized configuration class"),
        ({}, {"attn_implementation": "flash_attention_2"}, "FlashAttention2"),
    ],
    ids=["not causal", "not installed"],
)
def test_model_that_cannot_be_built_is_rejected(
    fields: dict[str, Any], values: dict[str, Any], found: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PRESETS["tiny"], **SMALL, **fields}))
    with pytest.raises(RejectedError, match=found) as caught:
        build(source=str(tmp_path), **values)
    assert caught.value.reason is Reason.UNREADABLE_MODEL
    assert len(caught.value.found) < 400


def test_missing_source_is_rejected() -> None:
    with pytest.raises(RejectedError, match=r"model\.source: Qwen/Qwen3-30B-A3B"):
        build(source="Qwen/Qwen3-30B-A3B")
