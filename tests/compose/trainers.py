# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ``Trainer`` and TRL's on it, which call the model as they please."""

from __future__ import annotations

import contextlib
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from activation_swap.errors import Reason
from activation_swap.trainer import ActivationSwapCallback
from tests.compose.combination import Combination
from tests.compose.lora import lora
from tests.compose.run import EVERYTHING, Kind, Run, compare
from tests.compose.tiny_model import VOCABULARY, batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS", "arguments", "rows"]

disable_progress_bars()
_WORDS = [f"w{index}" for index in range(VOCABULARY - 2)]


class _Witness(TrainerCallback):  # type: ignore[misc] # transformers has no types here
    """Tells a run of the steps of a Trainer, and what the swap's own callback applied."""

    def __init__(self, run: Run, swap: ActivationSwapCallback) -> None:
        self._run = run
        self._swap = swap
        self._step: Any = None

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        if self._run.kind is Kind.SWAPPED:
            self._run.watch(self._swap.swap)
        else:
            self._run.apply(model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step = self._run.step()
        self._step.__enter__()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self._run.record(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step.__exit__(None, None, None)


def _recording(kind: type[Any], run: Run) -> type[Any]:
    """Return a Trainer class that also records its losses."""

    class Recording(kind):  # type: ignore[misc] # the base is a parameter
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **options)
            run.losses.append(loss.detach().clone())
            return loss

    return Recording


def rows(count: int = 16) -> Dataset:
    """Return tokenized rows."""
    tokens = batch(0, rows=count)["input_ids"].tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])


def arguments(directory: str, kind: Callable[..., Any] = TrainingArguments, **values: Any) -> Any:
    """Return arguments for a short training on the CPU."""
    defaults = {
        "output_dir": directory,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        "bf16": False,
    }
    return kind(**(defaults | values))


def train(run: Run, *, peft: bool = False, **values: Any) -> None:
    """Train by Hugging Face's Trainer."""
    model: Any = tiny_model()
    model = lora(model) if peft else model
    _run_trainer(run, Trainer, TrainingArguments, model=model, data=rows(), values=values)


def _run_trainer(
    run: Run,
    kind: type[Any],
    config: Callable[..., Any],
    *,
    model: Any,
    data: Dataset,
    values: dict[str, Any],
    **options: Any,
) -> None:
    swap = ActivationSwapCallback(
        "attention" if run.kind is Kind.SWAPPED else "none", policy=EVERYTHING
    )
    # TRL prints its table of metrics.
    with TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        trainer = _recording(kind, run)(
            model=model,
            args=arguments(directory, config, max_steps=run.steps, **values),
            train_dataset=data,
            callbacks=[swap, _Witness(run, swap)],
            **options,
        )
        trainer.train()
    assert not swap.swap.active
    if run.kind is Kind.SWAPPED:
        logged = [log.get("activation_swap/saved_bytes", 0) for log in trainer.state.log_history]
        assert logged[0] > 0, trainer.state.log_history
    for name, weight in model.named_parameters():
        run.keep(f"trained.{name}", weight)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words w0, w1, and so on."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("pad_token", "eos_token"), ("<pad>", "<eos>"), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _text(seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(_WORDS), (length,), generator=generator).tolist()
    return " ".join(_WORDS[index] for index in chosen)


def fine_tune(run: Run, **values: Any) -> None:
    """Train by TRL's SFTTrainer."""
    data = Dataset.from_list([{"text": _text(seed, 20 + seed)} for seed in range(16)])
    options = {"model": tiny_model(), "processing_class": words()}
    _run_trainer(run, SFTTrainer, SFTConfig, data=data, values=values, **options)


def prefer(run: Run, *, reference: bool = True, **values: Any) -> None:
    """Train by TRL's DPOTrainer, with a copy of the model as its reference."""
    data = Dataset.from_list(
        [
            {
                "prompt": _text(seed, 6),
                "chosen": " " + _text(seed + 100, 12),
                "rejected": " " + _text(seed + 200, 9),
            }
            for seed in range(16)
        ]
    )
    options: dict[str, Any] = {"processing_class": words()}
    model: Any = tiny_model()
    if reference:
        options["ref_model"] = tiny_model()
    else:
        model = lora(model)
    _run_trainer(run, DPOTrainer, DPOConfig, model=model, data=data, values=values, **options)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Prefer many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def reinforce(run: Run) -> None:
    """Train by TRL's GRPOTrainer, which generates between its training forwards."""
    data = Dataset.from_list([{"prompt": _text(seed, 5)} for seed in range(16)])
    values = {
        "num_generations": 2,
        "max_completion_length": 12,
        "gradient_checkpointing": False,
    }
    options = {"processing_class": words(), "reward_funcs": reward}
    _run_trainer(
        run, GRPOTrainer, GRPOConfig, model=tiny_model(), data=data, values=values, **options
    )


def refuse(**values: Any) -> None:
    """Ask a Trainer for what does not go with a swap."""
    with TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        args = arguments(directory, max_steps=1, **values)
        callback = ActivationSwapCallback()
        Trainer(tiny_model(), args, train_dataset=rows(), callbacks=[callback]).train()


def _combinations() -> Iterator[Combination]:
    variants: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16 autocast, gradient accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
        "PEFT LoRA": {"peft": True},
        "use_cache left on": {"use_cache": True},
    }
    for name, values in variants.items():
        yield Combination(
            tool="Hugging Face Trainer",
            name=name,
            check=partial(
                compare,
                partial(train, **values),
                warns_of="use_cache=False" if "use_cache" in values else "",
            ),
            remark="ActivationSwapCallback",
        )
    yield Combination(
        tool="Hugging Face Trainer",
        name="torch_compile",
        check=partial(refuse, torch_compile=True, torch_compile_backend="eager"),
        refused=Reason.COMPILE_REQUESTED,
    )
    yield Combination(
        tool="Hugging Face Trainer",
        name="gradient_checkpointing",
        check=partial(refuse, gradient_checkpointing=True),
        refused=Reason.CHECKPOINT_REQUESTED,
    )
    trl: dict[str, Any] = {
        "SFTTrainer": partial(fine_tune, gradient_checkpointing=False),
        "SFTTrainer, packed": partial(
            fine_tune, gradient_checkpointing=False, packing=True, max_length=64
        ),
        "DPOTrainer with a reference model": partial(prefer, gradient_checkpointing=False),
        "DPOTrainer with LoRA, its base as reference": partial(
            prefer, reference=False, gradient_checkpointing=False
        ),
        "GRPOTrainer": reinforce,
    }
    for name, scenario in trl.items():
        yield Combination(
            tool="TRL",
            name=name,
            check=partial(compare, scenario),
            quick=name in {"SFTTrainer", "DPOTrainer with a reference model"},
            remark="ActivationSwapCallback, gradient_checkpointing=False",
        )
    yield Combination(
        tool="TRL",
        name="SFTTrainer with TRL's default of gradient_checkpointing",
        check=partial(fine_tune, Run.swapped()),
        refused=Reason.CHECKPOINT_REQUESTED,
    )


COMBINATIONS = tuple(_combinations())
