# SPDX-License-Identifier: Apache-2.0
"""One run: its parts, its steps, its checkpoints."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from activation_swap import registry
from activation_swap.errors import Reason
from activation_swap.trainer.checkpoint import (
    CheckpointStore,
    RunState,
    read_state,
    reading_checkpoint,
    restore_checkpoint,
    write_checkpoint,
)
from activation_swap.trainer.corpus import open_corpus
from activation_swap.trainer.device import (
    determinism,
    peak_device_bytes,
    resolve_device,
    synchronize,
)
from activation_swap.trainer.metrics import MetricsFile
from activation_swap.trainer.model import build_model
from activation_swap.trainer.optimizer import build_optimizer
from activation_swap.trainer.output import OutputDirectory
from activation_swap.trainer.progress import step_progress
from activation_swap.trainer.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from activation_swap.trainer.config import Config

__all__ = ["StepResult", "Trainer", "forward_backward", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: Mean loss of the microbatches, exactly as the device computed it.
        seconds: From the first launch until the device was done.
    """

    loss: float
    seconds: float


def forward_backward(model: nn.Module, microbatches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run forward and backward of each microbatch in turn.

    Args:
        model: A causal language model of Transformers.
        microbatches: Token ids ``[batch_size, sequence_length]`` on the model's device.

    Returns:
        The mean loss, a scalar without graph on the model's device.
    """
    losses = []
    for tokens in microbatches:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(microbatches)
        loss.backward()
        losses.append(loss.detach())
    total: torch.Tensor = sum(losses[1:], start=losses[0])
    return total


class Trainer:
    """Everything of one run that lives on a device, and the position in its data.

    Args:
        config: The run.

    Attributes:
        model: The model, swapped if the configuration says so.
        optimizer: Its optimizer.
        swap: The swap; inactive for ``activation_swap: none``.
        device: Where the model is.
        done: Steps done.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        self.device = resolve_device(config.device)
        self.model = build_model(config.model, device=self.device, seed=config.seed)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.swap = registry.apply(config.activation_swap, self.model)
        self.done = 0
        self._corpus = open_corpus(config.data, vocab_size=self.model.config.vocab_size)
        self._stream = TokenStream(self._corpus)

    def step(self) -> StepResult:
        """Train on the next microbatches."""
        microbatches = [self._next_microbatch() for _ in range(self._config.gradient_accumulation)]
        synchronize(self.device)
        start = time.perf_counter()
        loss = forward_backward(self.model, microbatches)
        self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        self.done += 1
        return StepResult(loss=loss.item(), seconds=seconds)

    def save(self, store: CheckpointStore) -> Path:
        """Add a checkpoint of this moment to ``store`` and return its directory."""
        state = RunState(
            step=self.done,
            position=self._stream.position,
            corpus=self._corpus.digest,
            trajectory=self._config.trajectory(),
        )
        return store.save(
            self.done,
            lambda directory: write_checkpoint(
                directory,
                model=self.model,
                optimizer=self.optimizer,
                device=self.device,
                state=state,
            ),
        )

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint with the same numbers as a run that never stopped.

        Args:
            checkpoint: Its directory.

        Raises:
            RejectedError: AS409 when it cannot be read, AS410 when it is of another run.
        """
        state = read_state(checkpoint)
        here = {**self._config.trajectory(), "data (content)": self._corpus.digest}
        there = {**state.trajectory, "data (content)": state.corpus}
        # They decide the numbers of sums on a CPU, and nothing elsewhere.
        ignored = () if self.device.type == "cpu" else ("cpu_threads",)
        differing = [
            key
            for key in {**here, **there}
            if key not in ignored and here.get(key) != there.get(key)
        ]
        if differing:
            raise Reason.OTHER_TRAJECTORY.error(
                found=f"other values for {', '.join(differing)}",
                where=str(checkpoint),
                trace=tuple(
                    f"{key}: {there.get(key)} in the checkpoint, {here.get(key)} now"
                    for key in differing
                ),
            )
        with reading_checkpoint(checkpoint):
            self._stream = TokenStream(self._corpus, state.position)
        restore_checkpoint(
            checkpoint, model=self.model, optimizer=self.optimizer, device=self.device
        )
        self.done = state.step

    def _next_microbatch(self) -> torch.Tensor:
        tokens = self._stream.take(
            batch_size=self._config.batch_size, sequence_length=self._config.sequence_length
        )
        return tokens.to(self.device)


def train(config: Config, *, resume: bool = False) -> float:
    """Train to the last step of the configuration.

    Args:
        config: The run.
        resume: Go on from the newest checkpoint below ``config.output``, if there is one.

    Returns:
        The loss of the last step, NaN when every step had been done before.

    Raises:
        RejectedError: AS408 when there is an earlier run and ``resume`` is false, AS415 when the
            directory cannot be written to, AS418 when another run writes there, AS419 when the
            metrics to go on with cannot be read; and what :class:`Trainer` and
            :meth:`Trainer.resume` raise.
        SwapStateError: AS417 when metrics or a checkpoint cannot be written.
    """
    loss = float("nan")
    with ExitStack() as stack:
        output = stack.enter_context(OutputDirectory(config.output))
        if not resume:
            output.refuse_earlier_run(resumable=True)
        store = CheckpointStore(output.checkpoints, keep=config.checkpoint.keep)
        checkpoints = store.complete()
        trainer = Trainer(config)
        if checkpoints:
            trainer.resume(checkpoints[-1])
        if trainer.done >= config.steps:
            sys.stderr.write(
                f"nothing was run: {checkpoints[-1]} is at step {trainer.done}, "
                f"steps is {config.steps}\n"
            )
            return loss
        stack.enter_context(determinism(enabled=config.deterministic))
        stack.enter_context(store.naming_newest())
        metrics = MetricsFile(output.metrics, after_step=trainer.done)
        stack.callback(metrics.close)
        advance = stack.enter_context(step_progress("train", total=config.steps, done=trainer.done))
        while trainer.done < config.steps:
            result = trainer.step()
            loss = result.loss
            _record(metrics, trainer, result, config)
            advance(loss=loss)
            every = config.checkpoint.every
            if every and (trainer.done % every == 0 or trainer.done == config.steps):
                trainer.save(store)
    return loss


def _record(metrics: MetricsFile, trainer: Trainer, result: StepResult, config: Config) -> None:
    tokens = config.gradient_accumulation * config.batch_size * config.sequence_length
    stats = trainer.swap.stats()
    metrics.write(
        step=trainer.done,
        loss=result.loss,
        seconds=result.seconds,
        tokens_per_second=tokens / result.seconds,
        peak_device_bytes=peak_device_bytes(trainer.device),
        offloaded_bytes=stats.offloaded_bytes,
        reloaded_bytes=stats.reloaded_bytes,
        reload_misses=stats.reload_misses,
        host_bytes_reserved=stats.host_bytes_reserved,
    )
    trainer.swap.reset_stats()
