# SPDX-License-Identifier: Apache-2.0
"""Runs: they learn, they resume bit for bit, they do nothing in mode none."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer import loop
from activation_swap.trainer.checkpoint import CheckpointStore
from activation_swap.trainer.loop import Trainer, forward_backward, train
from activation_swap.trainer.metrics import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from activation_swap.trainer.config import Config

    from .conftest import MakeConfig

pytestmark = pytest.mark.level0

ADAMW = {"name": "adamw", "lr": 1e-2}
SGD = {"name": "sgd_in_backward", "lr": 1e-1}


def losses(config: Config) -> list[float]:
    return [line["loss"] for line in read_metrics(config.output / "metrics.jsonl")]


def weights(config: Config) -> bytes:
    newest = CheckpointStore(config.output / "checkpoints", keep=1).complete()[-1]
    return (newest / "model.safetensors").read_bytes()


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_loss_falls(optimizer: dict[str, Any], make_config: MakeConfig) -> None:
    config = make_config(optimizer=optimizer, steps=12)
    last = train(config)
    first = losses(config)[0]
    assert first == pytest.approx(5.55, abs=0.1)  # ln 256: nothing is known yet
    assert last < first - 0.3


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_gives_the_same_bits(
    optimizer: dict[str, Any], dtype: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    accumulation = 2 if optimizer is ADAMW else 1
    run: dict[str, Any] = {
        "optimizer": optimizer,
        "gradient_accumulation": accumulation,
        "checkpoint": {"every": 2},
    }
    # Dropout makes the run depend on the random generator too.
    overrides = {"hidden_size": 32, "num_hidden_layers": 2, "attention_dropout": 0.3}
    run["model"] = {"dtype": dtype, "overrides": overrides}
    whole = make_config(**run, steps=5, output=str(tmp_path / "whole"))
    train(whole)
    parts = make_config(**run, steps=3, output=str(tmp_path / "parts"))
    train(parts)
    train(make_config(**run, steps=5, output=str(tmp_path / "parts")), resume=True)
    assert losses(parts) == losses(whole)
    assert len(set(losses(whole))) == 5
    assert weights(parts) == weights(whole)


def test_resume_without_checkpoint_starts_at_the_start(make_config: MakeConfig) -> None:
    config = make_config()
    train(config, resume=True)
    assert len(losses(config)) == 4


def test_finished_run_has_nothing_to_resume(make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"every": 4})
    train(config)
    before = weights(config), losses(config)
    assert train(config, resume=True) != train(config, resume=True)  # NaN
    assert (weights(config), losses(config)) == before


def test_nothing_to_resume_is_told(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_config(checkpoint={"every": 4}))
    metrics = (make_config().output / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    train(make_config(steps=2), resume=True)
    assert capsys.readouterr().err.endswith("step-00000004 is at step 4, steps is 2\n")
    assert (make_config().output / "metrics.jsonl").read_bytes() == metrics


def test_resume_without_checkpoint_keeps_the_metrics(make_config: MakeConfig) -> None:
    config = make_config()
    train(config)
    before = (config.output / "metrics.jsonl").read_bytes()
    train(config, resume=True)
    assert (config.output / "metrics.jsonl.1").read_bytes() == before


def test_second_run_in_the_directory_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=1)
    refused = []

    def step(trainer: Trainer) -> Any:
        with pytest.raises(RejectedError) as caught:
            train(config, resume=True)
        refused.append(caught.value.reason)
        return original(trainer)

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    train(config)
    assert refused == [Reason.OUTPUT_IN_USE]


def test_run_that_ends_early_names_what_to_go_on_from(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(checkpoint={"every": 1})

    def step(trainer: Trainer) -> Any:
        if trainer.done == 2:
            raise KeyboardInterrupt
        return original(trainer)

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(config)
    newest = config.output / "checkpoints" / "step-00000002"
    assert caught.value.__notes__ == [f"newest checkpoint: {newest}; --resume goes on from it"]


def test_last_step_is_saved_too(make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"every": 3, "keep": 5})
    train(config)
    names = [
        path.name for path in CheckpointStore(config.output / "checkpoints", keep=5).complete()
    ]
    assert names == ["step-00000003", "step-00000004"]


def test_checkpoints_of_an_earlier_run_are_not_overwritten(make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"every": 4})
    train(config)
    before = weights(config)
    with pytest.raises(RejectedError) as caught:
        train(config)
    assert caught.value.reason is Reason.EARLIER_RUN_IN_THE_WAY
    assert weights(config) == before
    assert len(losses(config)) == 4


def test_metrics_of_an_earlier_run_are_not_overwritten(make_config: MakeConfig) -> None:
    config = make_config()
    train(config)
    before = losses(config)
    with pytest.raises(RejectedError, match="0 checkpoints, metrics of 4 lines"):
        train(config)
    assert losses(config) == before


def test_output_that_cannot_be_made_is_rejected_before_the_model_is_built(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delattr(loop, "Trainer")
    with pytest.raises(RejectedError, match="NotADirectoryError") as caught:
        train(make_config(output=str(tmp_path / "file" / "out")))
    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 1}, "batch_size"),
        ({"optimizer": SGD}, "optimizer"),
        ({"model": {"overrides": {"hidden_size": 64}}}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_checkpoint_of_another_run_is_rejected(
    change: dict[str, Any], key: str, make_config: MakeConfig
) -> None:
    train(make_config(checkpoint={"every": 4}))
    with pytest.raises(RejectedError) as caught:
        train(make_config(**change), resume=True)
    assert caught.value.reason is Reason.OTHER_TRAJECTORY
    assert caught.value.found == f"other values for {key}"


@pytest.mark.parametrize("name", ["a.txt", "d.txt"], ids=["changed", "added"])
def test_changed_text_is_rejected(name: str, make_config: MakeConfig, text: Path) -> None:
    """Of the same size too."""
    train(make_config(checkpoint={"every": 4}))
    (text / name).write_text("A" * (text / "a.txt").stat().st_size)
    with pytest.raises(RejectedError, match=r"other values for data \(content\)"):
        train(make_config(steps=5), resume=True)


@pytest.mark.parametrize("position", [{"document": 9}, {"document": 0, "offset": 10**6}])
def test_position_that_is_not_in_the_text_is_a_damaged_checkpoint(
    position: dict[str, int], make_config: MakeConfig
) -> None:
    config = make_config(checkpoint={"every": 4})
    train(config)
    path = config.output / "checkpoints" / "step-00000004" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"position": position}))
    with pytest.raises(RejectedError) as caught:
        train(config, resume=True)
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT


def test_threads_of_the_cpu_decide_the_numbers_of_a_cpu_alone(make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"every": 4})
    train(config)
    (checkpoint,) = CheckpointStore(config.output / "checkpoints", keep=2).complete()
    trainer = Trainer(make_config(cpu_threads=2))
    with pytest.raises(RejectedError, match="other values for cpu_threads"):
        trainer.resume(checkpoint)
    trainer.device = torch.device("cuda")
    trainer.resume(checkpoint)
    assert trainer.done == 4


def test_swap_may_change_at_a_resume(make_config: MakeConfig, tmp_path: Path) -> None:
    """It moves bytes and changes no number."""
    run: dict[str, Any] = {"sequence_length": 512, "checkpoint": {"every": 1}}
    whole = make_config(**run, steps=3, output=str(tmp_path / "whole"))
    train(whole)
    parts = make_config(**run, steps=2, output=str(tmp_path / "parts"))
    train(parts)
    swapped = {"activation_swap": "attention", "steps": 3, "output": str(tmp_path / "parts")}
    train(make_config(**run, **swapped), resume=True)
    moved = [line["offloaded_bytes"] for line in read_metrics(parts.output / "metrics.jsonl")]
    assert moved[:2] == [0, 0]
    assert moved[2] > 0
    assert losses(parts) == losses(whole)
    assert weights(parts) == weights(whole)


def test_accumulated_gradients_are_those_of_the_whole_batch(make_config: MakeConfig) -> None:
    trainer = Trainer(make_config(model={"overrides": {"hidden_size": 32, "num_hidden_layers": 1}}))
    tokens = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(0))
    whole = forward_backward(trainer.model, [tokens])
    expected = [torch.as_tensor(weight.grad).clone() for weight in trainer.model.parameters()]
    trainer.model.zero_grad()
    parts = forward_backward(trainer.model, [tokens[:2], tokens[2:]])
    assert not parts.requires_grad
    torch.testing.assert_close(parts, whole)
    for weight, gradient in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(weight.grad), gradient, rtol=1e-4, atol=1e-6)


def test_metrics_name_what_a_user_watches(make_config: MakeConfig) -> None:
    config = make_config()
    train(config)
    (first, *_) = read_metrics(config.output / "metrics.jsonl")
    assert first["step"] == 1
    assert first["tokens_per_second"] == pytest.approx(48 / first["seconds"])
    assert first["offloaded_bytes"] == 0
    assert first["peak_device_bytes"] is None


def test_unknown_device_is_rejected(make_config: MakeConfig) -> None:
    with pytest.raises(RejectedError) as caught:
        Trainer(make_config(device="tpu"))
    assert caught.value.reason is Reason.DEVICE_UNAVAILABLE
    assert "cpu" in caught.value.expected


def test_deterministic_is_asked_for_during_the_run_only(make_config: MakeConfig) -> None:
    seen = []
    config = make_config(deterministic=True, steps=1)

    def step(trainer: Trainer) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(trainer)

    original = Trainer.step
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Trainer, "step", step)
        train(config)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_mode_none_does_not_import_the_engine(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 20)
    script = f"""
import sys
from pathlib import Path
from activation_swap.trainer.config import parse_config
from activation_swap.trainer.loop import Trainer
trainer = Trainer(parse_config({{
    "device": "cpu", "sequence_length": 8,
    "model": {{"overrides": {{"hidden_size": 32, "num_hidden_layers": 1}}}},
    "data": {{"files": [{str(tmp_path / "text.txt")!r}]}},
}}))
trainer.step()
assert not trainer.swap.active
for module in trainer.model.modules():
    assert not module._forward_hooks and not module._forward_pre_hooks, module
print([name for name in sys.modules if name.startswith("activation_swap.core")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
