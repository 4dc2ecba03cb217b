# SPDX-License-Identifier: Apache-2.0
"""Configurations and checkpoints are data: reading them runs nothing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.checkpoint import CheckpointStore
from activation_swap.trainer.config import load_config
from activation_swap.trainer.loop import train
from activation_swap.trainer.model import build_model

if TYPE_CHECKING:
    from .conftest import MakeConfig

pytestmark = pytest.mark.unit


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_bomb_works(tmp_path: Path) -> None:
    """The tests below could fail: plain pickle sets it off."""
    pickle.loads(pickle.dumps(Touch(tmp_path / "touched")))  # noqa: S301
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch",
        "!!python/object/new:os.system",
        "!!python/name:os.system",
    ],
)
def test_yaml_tags_are_not_obeyed(tag: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"output: {tag} [{tmp_path / 'touched'}]\n")
    with pytest.raises(RejectedError) as caught:
        load_config(path)
    assert caught.value.reason is Reason.UNREADABLE_CONFIG
    assert not (tmp_path / "touched").exists()


def test_overrides_are_as_safe_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(RejectedError):
        load_config(tmp_path / "run.yaml", ["output=!!python/name:os.system"])


def test_pickled_code_in_a_checkpoint_is_not_run(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(steps=1, checkpoint={"every": 1})
    train(config)
    (checkpoint,) = CheckpointStore(config.output / "checkpoints", keep=1).complete()
    torch.save(
        {"optimizer": Touch(tmp_path / "touched"), "generators": {}}, checkpoint / "optimizer.pt"
    )
    with pytest.raises(RejectedError) as caught:
        train(config, resume=True)
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT
    assert not (tmp_path / "touched").exists()


def test_model_directory_cannot_bring_code(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'touched')!r}).touch()\n"
    )
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    fields = {"model_type": "qwen3_moe", "vocab_size": 256, "auto_map": names}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_experts": 8, "head_dim": 8}
    section = make_config(model={"source": str(tmp_path / "model"), "overrides": small}).model
    model = build_model(section, device=torch.device("cpu"), seed=0)
    assert type(model).__module__.startswith("transformers.")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["~", "$HOME", "${HOME}", "$(touch touched)", "`touch touched`"])
def test_paths_are_taken_literally(
    name: str, tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "text.txt").write_text("text " * 100)
    config = make_config(steps=1, output=f"{name}/out", data={"files": [f"{name}/text.txt"]})
    train(config)
    assert (tmp_path / name / "out" / "metrics.jsonl").exists()
    assert not (tmp_path / "touched").exists()
