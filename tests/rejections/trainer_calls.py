# SPDX-License-Identifier: Apache-2.0
"""Refusals of the reference trainer: calls for :mod:`tests.rejections.call_cases`."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def illegal_config(_: Any) -> None:
    from activation_swap.trainer.config import parse_config

    parse_config({"activation_swap": "Attention", "steps": -1})


def config_of_no_pipeline(_: Any) -> None:
    from activation_swap.trainer.config import parse_config

    parse_config({"pp_size": 2, "checkpoint": {"every": 1}})


def unreadable_config(_: Any) -> None:
    from activation_swap.trainer.config import load_config

    load_config(Path("no-such-file.yaml"))


def absent_device(_: Any) -> None:
    from activation_swap.trainer.device import resolve_device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        resolve_device("no-such-device")


def unreadable_model(_: Any) -> None:
    from activation_swap.trainer.config import ModelSection
    from activation_swap.trainer.model import read_model_config

    read_model_config(ModelSection(source="no-such-preset"))


def experts_of_an_old_release(_: Any) -> None:
    from activation_swap.trainer import model
    from activation_swap.trainer.config import ModelSection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "installed_release", lambda: "4.57.6")
        model.build_model(
            ModelSection(experts_implementation="grouped_mm"), device=torch.device("cpu"), seed=0
        )


def tied_embedding(_: Any) -> None:
    from activation_swap.trainer.stage import prune
    from tests.models import VERY_TINY, build

    prune(build(VERY_TINY, tie_word_embeddings=True), range(1), first=True, last=False)


def no_data(_: Any) -> None:
    from activation_swap.trainer.config import DataSection
    from activation_swap.trainer.corpus import open_corpus

    open_corpus(DataSection(files=("no-such-file.txt",)), vocab_size=512)


def unreadable_tokenizer(_: Any) -> None:
    from activation_swap.trainer.config import DataSection
    from activation_swap.trainer.corpus import open_corpus

    open_corpus(DataSection(files=(__file__,), tokenizer=Path("no-such-tokenizer")), vocab_size=512)


def small_vocabulary(_: Any) -> None:
    from activation_swap.trainer.config import DataSection
    from activation_swap.trainer.corpus import open_corpus

    open_corpus(DataSection(files=(__file__,)), vocab_size=17)


def missing_extra(_: Any) -> None:
    from activation_swap.trainer import __main__ as command

    command.COMMANDS["sample"] = command.Command(
        module="no_such_package.sample", summary="a command whose package is not there"
    )
    try:
        command._load("sample")
    finally:
        del command.COMMANDS["sample"]


def config_at(path: Path, **changes: Any) -> Any:
    from activation_swap.trainer.config import parse_config

    raw = {
        "device": "cpu",
        "data": {"files": [__file__]},
        "steps": 1,
        "batch_size": 1,
        "sequence_length": 16,
        "output": str(path / "out"),
        "checkpoint": {"every": 1},
    }
    return parse_config(raw | changes)


def earlier_run_in_the_way(_: Any) -> None:
    from activation_swap.trainer.loop import train as run

    with directory() as path:
        run(config_at(path))
        run(config_at(path))


def unwritable_output(_: Any) -> None:
    from activation_swap.trainer.output import OutputDirectory

    with directory() as path:
        (path / "file").touch()
        OutputDirectory(path / "file" / "out")


def metrics_directory(_: Any) -> None:
    from activation_swap.trainer.output import OutputDirectory

    with directory() as path:
        (path / "metrics.jsonl").mkdir()
        OutputDirectory(path)


def output_in_use(_: Any) -> None:
    from activation_swap.trainer.output import OutputDirectory

    with directory() as path, OutputDirectory(path):
        OutputDirectory(path)


def earlier_metrics_in_the_way(_: Any) -> None:
    from activation_swap.trainer.output import OutputDirectory

    with directory() as path:
        (path / "metrics.jsonl").write_text("someone else's", "utf-8")
        with OutputDirectory(path) as output:
            output.refuse_earlier_run(resumable=True)


def unwritable_checkpoint(_: Any) -> None:
    from activation_swap.trainer.checkpoint import CheckpointStore

    with directory() as path:
        CheckpointStore(path, keep=1).save(1, lambda at: (at / "none" / "file").touch())


def renamed_checkpoint(_: Any) -> None:
    from activation_swap.trainer.checkpoint import CheckpointStore
    from activation_swap.trainer.loop import train as run

    with directory() as path:
        run(config_at(path))
        (checkpoint,) = CheckpointStore(path / "out" / "checkpoints", keep=1).complete()
        checkpoint.rename(checkpoint.with_name("step-00000100"))
        run(config_at(path, steps=200), resume=True)


def unreadable_metrics(_: Any) -> None:
    from activation_swap.trainer.metrics import MetricsFile

    with directory() as path:
        (path / "metrics.jsonl").write_text('{"step": 1}\n{"epoch": 2}\n{"step": 3}\n', "utf-8")
        MetricsFile(path / "metrics.jsonl", after_step=3)


def damaged_checkpoint(_: Any) -> None:
    from activation_swap.trainer.checkpoint import read_state

    with directory() as path:
        (path / "state.json").write_text(json.dumps({}))
        read_state(path)


def other_trajectory(_: Any) -> None:
    from activation_swap.trainer.loop import train as run

    with directory() as path:
        run(config_at(path))
        run(config_at(path, seed=99, steps=2), resume=True)


def pipeline_without_ranks(_: Any) -> None:
    from activation_swap.trainer.ranks import join_ranks

    with join_ranks(device="cpu", pp_size=2):
        pass


def resume_a_pipeline(_: Any) -> None:
    from activation_swap.trainer.train import run

    with directory() as path:
        config = path / "pipeline.yaml"
        config.write_text("{pp_size: 2, microbatches: 2, checkpoint: {}}", encoding="utf-8")
        run(Namespace(config=config, overrides=[], resume=True))
