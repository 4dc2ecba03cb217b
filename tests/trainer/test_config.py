"""The YAML file: defaults, strictness, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.config import Config, load_config, parse_config

pytestmark = pytest.mark.unit

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


def test_unknown_key_lists_the_keys_of_its_section() -> None:
    assert rejection({"data": {"path": "x"}}).expected == "one of files, tokenizer"
    assert "betas" in rejection({"optimizer": {"name": "adamw", "momentum": 1}}).expected
    assert "activation_swap" in rejection({"activation-swap": "none"}).expected


def test_all_findings_are_reported_at_once() -> None:
    error = rejection({"steps": 0, "batch_size": 0})
    assert len(error.trace) == 1
    assert "steps: 0" in error.trace[0]


def test_accumulation_with_updates_inside_backward_is_rejected() -> None:
    error = rejection({"optimizer": {"name": "sgd_in_backward"}, "gradient_accumulation": 2})
    assert "gradient_accumulation above 1 needs optimizer.name: adamw" in error.expected


def test_rate_without_a_dot_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads it as a string."""
    path = write(tmp_path, "optimizer: {name: adamw, lr: 1e-4}\n")
    assert load_config(path).optimizer.lr == 1e-4


def test_frozen() -> None:
    config = parse_config({})
    with pytest.raises(ValidationError):
        config.steps = 3


@pytest.mark.parametrize("text", ["a: [", "{a: b: c}"])
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
    config = load_config(path, ["model.dtype=bfloat16", "steps=5", "data.files=[a, b]"])
    assert (config.model.dtype, config.steps, config.data.files) == ("bfloat16", 5, ("a", "b"))


@pytest.mark.parametrize("override", ["steps", "steps.a=3"])
def test_bad_override_is_rejected(override: str, tmp_path: Path) -> None:
    with pytest.raises(RejectedError) as caught:
        load_config(write(tmp_path, "steps: 3\n"), [override])
    assert caught.value.reason is Reason.UNREADABLE_CONFIG


def test_trajectory_leaves_out_where_and_how_long() -> None:
    here = parse_config({"steps": 3, "output": "a", "activation_swap": "attention"})
    there = parse_config({"steps": 9, "output": "b"})
    assert here.trajectory() == there.trajectory()
    assert here.trajectory() != parse_config({"seed": 1}).trajectory()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_parses(path: Path) -> None:
    assert load_config(path).activation_swap == "attention"


def test_there_are_shipped_configurations() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "qwen3-30b-a3b"}
