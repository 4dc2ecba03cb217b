# SPDX-License-Identifier: Apache-2.0
"""The YAML file: defaults, strictness, messages."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.config import AdamWSection, Config, load_config, parse_config

pytestmark = pytest.mark.unit

SGD = {"name": "sgd_in_backward"}
PIPELINE = {"pp_size": 2, "microbatches": 2}
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text, "utf-8")
    return path


def rejection(raw: Any) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        parse_config(raw, where="run.yaml")
    assert caught.value.reason is Reason.INVALID_CONFIG
    return caught.value


def test_default_is_none() -> None:
    assert parse_config({}).activation_swap == "none"


def test_defaults() -> None:
    assert json.loads(Config().model_dump_json()) == {
        "activation_swap": "none",
        "device": "auto",
        "batch_size": 2,
        "sequence_length": 1024,
        "gradient_accumulation": 1,
        "pp_size": 1,
        "microbatches": 1,
        "schedule": "1F1B",
        "steps": 20,
        "seed": 0,
        "cpu_threads": None,
        "deterministic": False,
        "output": "out/run",
        "model": {
            "source": "tiny",
            "overrides": {},
            "dtype": "float32",
            "attn_implementation": "sdpa",
            "experts_implementation": None,
        },
        "data": {"files": None, "tokenizer": None},
        "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "checkpoint": {"every": None, "keep": 2},
        "compare": {
            "digest_steps": 4,
            "warmup_steps": 2,
            "timed_steps": 8,
            "repeat_baseline": False,
        },
    }
    assert parse_config({"optimizer": SGD}).optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("key", "legal"),
    [
        ("dtype", "float32 | bfloat16"),
        ("attn_implementation", "eager | sdpa | flash_attention_2"),
        ("experts_implementation", "eager | batched_mm | grouped_mm"),
    ],
)
def test_choices_of_the_model(key: str, legal: str) -> None:
    for value in legal.split(" | "):
        assert getattr(parse_config({"model": {key: value}}).model, key) == value
    assert rejection({"model": {key: "other"}}).expected.replace(", ", " | ") == legal


@pytest.mark.parametrize("mode", ["none", "attention"])
def test_legal_modes_parse(mode: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"activation_swap: {mode}\n")
    assert load_config(path).activation_swap == mode


@pytest.mark.parametrize("value", ["attn", "None", "Attention", "", "off", "true", "1", "[none]"])
def test_wrong_mode_names_key_value_and_legal_ones(value: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"activation_swap: {value}\n")
    with pytest.raises(RejectedError) as caught:
        load_config(path)
    error = caught.value
    assert error.reason is Reason.INVALID_CONFIG
    assert error.where == f"{path}: activation_swap"
    assert error.found == f"activation_swap: {yaml.safe_load(value)!r}"
    assert error.expected == "none | attention"


def test_null_mode_is_not_none() -> None:
    assert rejection({"activation_swap": None}).found == "activation_swap: None"


@pytest.mark.parametrize(
    ("raw", "where", "found"),
    [
        ({"stepz": 3}, "run.yaml: stepz", "unknown key 'stepz'"),
        ({"data": {"path": "x"}}, "run.yaml: data.path", "unknown key 'data.path'"),
        ({"foo.bar": 1}, "run.yaml: foo.bar", "unknown key 'foo.bar'"),
        ({"steps.x": 1}, "run.yaml: steps.x", "unknown key 'steps.x'"),
        ({"model": {"a.b": 1}}, "run.yaml: model.a.b", "unknown key 'model.a.b'"),
        ({"model": {"overrides": {"a.b": [1]}}}, "run.yaml: model.overrides.a.b", "a.b: [1]"),
        ({"steps": "3"}, "run.yaml: steps", "steps: '3'"),
        ({"steps": 3.0}, "run.yaml: steps", "steps: 3.0"),
        ({"steps": True}, "run.yaml: steps", "steps: True"),
        ({"steps": 0}, "run.yaml: steps", "steps: 0"),
        ({"model": {"dtype": "fp16"}}, "run.yaml: model.dtype", "dtype: 'fp16'"),
        ({"optimizer": {"name": "adamw", "lr": -1}}, "run.yaml: optimizer.lr", "lr: -1"),
        ({"data": {"files": []}}, "run.yaml: data.files", "files: []"),
        ({"model": "tiny"}, "run.yaml: model", "model: 'tiny'"),
        ([1], "run.yaml", "[1]"),
    ],
)
def test_rejection_names_key_and_value(raw: Any, where: str, found: str) -> None:
    error = rejection(raw)
    assert error.where == where
    assert error.found == found


DEEP: Any = 1
for _ in range(100_000):
    DEEP = [DEEP]
HOLDS_ITSELF: dict[str, Any] = {"model": {}}
HOLDS_ITSELF["model"]["overrides"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"output": date(2026, 1, 1)}, "Object of type date is not JSON serializable"),
        ({"output": Path("out")}, "is not JSON serializable"),
        ({date(2026, 1, 1): 1}, "keys must be str"),
        (HOLDS_ITSELF, "Circular reference"),
        ({"output": DEEP}, "recursion"),
    ],
    ids=["date", "path", "key", "itself", "deep"],
)
def test_what_is_not_plain_data_is_rejected(raw: dict[Any, Any], found: str) -> None:
    error = rejection(raw)
    assert found in error.found
    assert error.where == "run.yaml"


def adamw(**fields: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "adamw", **fields}}


@pytest.mark.parametrize(
    "raw",
    [
        {"batch_size": 1},
        {"sequence_length": 2},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"cpu_threads": 1},
        {"checkpoint": {"every": 1, "keep": 1}},
        {"compare": {"warmup_steps": 0}},
        {"data": {"files": ["one"]}},
        adamw(lr=0.5),
        adamw(lr=1e-9, betas=[0, 0.999], weight_decay=0),
        adamw(lr="1e-3", betas=["0", "9e-1"], weight_decay="1e-2"),
        {"optimizer": {"name": "sgd_in_backward", "lr": 2}},
        {"optimizer": SGD, "gradient_accumulation": 1},
        {"gradient_accumulation": 2},
        {"pp_size": 2},
        PIPELINE,
        {"checkpoint": {"every": 1}, "optimizer": SGD},
    ],
    ids=str,
)
def test_what_is_just_legal(raw: dict[str, Any]) -> None:
    config = json.loads(parse_config(raw).model_dump_json())

    def read(key: str, value: Any, given: Any) -> None:
        if isinstance(given, dict):
            for name, item in given.items():
                read(f"{key}.{name}", value[name], item)
        elif isinstance(given, list):
            for name, item in enumerate(given):
                read(f"{key}.{name}", value[name], item)
        else:
            assert value == (float(given) if isinstance(value, float) else given), key

    read("config", config, raw)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"cpu_threads": 0}, "cpu_threads"),
        ({"cpu_threads": 99999999999999}, "cpu_threads"),
        ({"batch_size": 2**63}, "batch_size"),
        ({"deterministic": 1}, "deterministic"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
        ({"compare": {"warmup_steps": -1}}, "compare.warmup_steps"),
        ({"model": {"overrides": {"rope": [1]}}}, "model.overrides.rope"),
        (adamw(lr=0), "optimizer.lr"),
        (adamw(lr=float("inf")), "optimizer.lr"),
        (adamw(lr=float("nan")), "optimizer.lr"),
        (adamw(betas=[1, 0.9]), "optimizer.betas.0"),
        (adamw(betas=[0.9, -0.1]), "optimizer.betas.1"),
        (adamw(weight_decay=-0.1), "optimizer.weight_decay"),
        (adamw(weight_decay=float("inf")), "optimizer.weight_decay"),
        ({"optimizer": {"name": "sgd_in_backward", "betas": [0, 0]}}, "optimizer.betas"),
        ({"optimizer": {"name": "adam"}}, "optimizer"),
        ({"optimizer": {"name": None}}, "optimizer"),
        ({"optimizer": {"name": []}}, "optimizer"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr"),
        ({"optimizer": "adamw"}, "optimizer"),
        (adamw(betas=[0.9]), "optimizer.betas"),
        (adamw(betas="adamw"), "optimizer.betas"),
    ],
    ids=str,
)
def test_what_is_just_illegal(raw: dict[str, Any], key: str) -> None:
    assert rejection(raw).where == f"run.yaml: {key}"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"optimizer": SGD, "gradient_accumulation": 2},
            "gradient_accumulation above 1 needs optimizer.name: adamw",
        ),
        (
            {"microbatches": 2},
            "microbatches above 1 needs pp_size above 1; see gradient_accumulation",
        ),
        (
            PIPELINE | {"gradient_accumulation": 2},
            "pp_size above 1 needs gradient_accumulation: 1; see microbatches",
        ),
        (PIPELINE | {"optimizer": SGD}, "pp_size above 1 needs optimizer.name: adamw"),
        (PIPELINE | {"checkpoint": {"every": 1}}, "checkpoint.every needs pp_size: 1"),
    ],
    ids=str,
)
def test_what_does_not_go_together(raw: dict[str, Any], expected: str) -> None:
    assert rejection(raw).expected == expected


def test_unknown_key_lists_the_keys_of_its_section() -> None:
    assert rejection({"data": {"path": "x"}}).expected == "one of files, tokenizer"
    adamw = rejection({"optimizer": {"name": "adamw", "momentum": 1}})
    assert adamw.expected == "one of betas, lr, name, weight_decay"
    assert rejection({"optimizer": {"momentum": 1}}).expected == adamw.expected
    assert rejection({"optimizer": {**SGD, "betas": [0.1, 0.2]}}).expected == "one of lr, name"
    assert "adamw | sgd_in_backward" in rejection({"optimizer": {"name": "adam"}}).expected
    assert "activation_swap" in rejection({"activation-swap": "none"}).expected


@pytest.mark.parametrize("raw", [{"model.source": "tiny"}, {"data": {"a.b": 1}}], ids=str)
def test_dotted_key_is_told_that_sections_nest(raw: Any) -> None:
    assert rejection(raw).expected.endswith("; sections nest in the file; a.b=VALUE is for --set")
    assert ", source" not in rejection(raw).expected


@pytest.mark.parametrize(
    ("raw", "where"),
    [([1], "run.yaml"), ({"model": 1}, "run.yaml: model"), ({"model": {"overrides": 1}}, None)],
    ids=str,
)
def test_what_is_no_mapping_is_told_so(raw: Any, where: str | None) -> None:
    error = rejection(raw)
    assert error.where == (where or "run.yaml: model.overrides")
    assert error.expected == "a mapping: keys with values"


@pytest.mark.parametrize("section", ["model", "data", "optimizer", "checkpoint", "compare"])
def test_section_without_content_has_its_defaults(section: str) -> None:
    assert parse_config({section: None}) == Config()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("dtype", "dtype"),
        ("torch_dtype", "dtype"),
        ("attn_implementation", "attn_implementation"),
        ("_attn_implementation", "attn_implementation"),
        ("experts_implementation", "experts_implementation"),
        ("_experts_implementation", "experts_implementation"),
    ],
)
def test_override_of_what_has_a_key_of_its_own_is_rejected(name: str, key: str) -> None:
    """The key would win without a word."""
    error = rejection({"model": {"overrides": {name: "eager"}}})
    assert error.where == "run.yaml: model.overrides"
    assert error.expected == f"model.{key} in place of the override {name}"


def test_all_findings_are_reported_at_once() -> None:
    error = rejection({"steps": 0, "batch_size": 0})
    assert len(error.trace) == 1
    assert "steps: 0" in error.trace[0]


def test_rate_without_a_dot_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads it as a string."""
    path = write(tmp_path, "optimizer: {name: adamw, lr: 1e-4}\n")
    assert load_config(path).optimizer.lr == 1e-4


@pytest.mark.parametrize("value", ["2026-11-29", "2026-13-45", "2026-11-29 10:00:00", "1:30"])
def test_dates_and_times_are_text(value: str, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"output: {value}\n")).output == Path(value)
    with pytest.raises(RejectedError, match="steps: '"):
        load_config(tmp_path / "run.yaml", [f"steps={value}"])


def test_alias_of_what_it_is_in_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "model: &model {overrides: *model}\n")
    with pytest.raises(RejectedError, match="Circular reference") as caught:
        load_config(path)
    assert caught.value.reason is Reason.INVALID_CONFIG


def test_frozen() -> None:
    config = parse_config({})
    with pytest.raises(ValidationError):
        config.steps = 3


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "{a: b: c}",
        "steps: 1\nsteps: 2",
        "model: {dtype: float32, 'dtype': bfloat16}",
        "1: 1",
        "on: 1",
        "[a, b]: 1",
        "steps: !!int many",
        "steps: !!int ''",
        "deterministic: !!bool x",
        "[" * 5000,
        "output: !!timestamp 2026-11-29",
        "output: !!binary aGk=",
        "output: !!set {a, b}",
        "output: !!omap [a: 1]",
        "output: !!pairs [a: 1]",
    ],
)
def test_broken_yaml_is_rejected(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RejectedError) as caught:
        load_config(path)
    assert caught.value.reason is Reason.UNREADABLE_CONFIG
    assert caught.value.where == str(path)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="FileNotFoundError"):
        load_config(tmp_path / "none.yaml")


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == Config()


def test_overrides_are_yaml_on_top_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 3\nmodel: {dtype: float32}\n")
    config = load_config(path, ["model.dtype=bfloat16", "steps=5", "data.files=[a, b=c]"])
    assert (config.model.dtype, config.steps, config.data.files) == ("bfloat16", 5, ("a", "b=c"))


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("steps", "TypeError: override 'steps' is not key=value"),
        ("steps.a=3", "TypeError: steps holds 3, and no keys"),
        ("data.files.0=x", "TypeError: files holds ['a'], and no keys"),
        ("model.source.a.b=x", "TypeError: source holds 'tiny', and no keys"),
        ("steps=[", "ParserError: while parsing a flow node"),
    ],
)
def test_bad_override_is_rejected(override: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(RejectedError) as caught:
        load_config(
            write(tmp_path, "{steps: 3, data: {files: [a]}, model: {source: tiny}}"), [override]
        )
    assert caught.value.reason is Reason.UNREADABLE_CONFIG
    assert caught.value.where == f"--set {override}"
    assert caught.value.found.startswith(found)


@pytest.mark.parametrize("content", ["[1]", "text", "3"])
def test_override_of_a_file_without_keys_is_rejected(content: str, tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=r"the file holds .+ and no keys"):
        load_config(write(tmp_path, content), ["steps=3"])


@pytest.mark.parametrize("content", ["", "model:", "model: {overrides: }"])
def test_override_fills_what_is_empty(content: str, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, content), ["model.overrides.head_dim=8"])
    assert config.model.overrides == {"head_dim": 8}


def test_optimizer_without_a_name_is_the_default_one(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""), ["optimizer.lr=1e-4"])
    assert config.optimizer == AdamWSection(lr=1e-4)
    assert parse_config({"optimizer": {"betas": [0.5, 0.6]}}) == Config(
        optimizer=AdamWSection(betas=(0.5, 0.6))
    )


def test_trajectory_leaves_out_where_and_how_long() -> None:
    changes = {
        "activation_swap": "attention",
        "device": "cpu",
        "steps": 3,
        "output": "a",
        "checkpoint": {"every": 2},
        "compare": {"timed_steps": 1},
    }
    here, there = parse_config(changes), parse_config({})
    assert here.trajectory() == there.trajectory()
    assert here.trajectory() != parse_config({"seed": 1}).trajectory()


def test_trajectory_is_json() -> None:
    trajectory = parse_config({"data": {"files": ["a"], "tokenizer": "b"}}).trajectory()
    assert json.loads(json.dumps(trajectory)) == trajectory


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_parses(path: Path) -> None:
    assert load_config(path).activation_swap == "attention"


def test_there_are_shipped_configurations() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "qwen3-30b-a3b"}
