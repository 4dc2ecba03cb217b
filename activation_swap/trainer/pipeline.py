# SPDX-License-Identifier: Apache-2.0
"""Training with pipeline parallelism: stages split by layer, and FSDP2 within a stage."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from activation_swap import TrainingSetup, registry
from activation_swap.core.schedule.torch_orders import compute_orders
from activation_swap.trainer.corpus import open_corpus
from activation_swap.trainer.device import determinism, peak_device_bytes, synchronize
from activation_swap.trainer.loop import StepResult
from activation_swap.trainer.metrics import MetricsFile
from activation_swap.trainer.model import build_model
from activation_swap.trainer.optimizer import build_optimizer
from activation_swap.trainer.output import OutputDirectory
from activation_swap.trainer.progress import step_progress
from activation_swap.trainer.ranks import join_ranks, on_first_rank
from activation_swap.trainer.stage import Stage, prune, shard
from activation_swap.trainer.stage_schedule import build_schedule
from activation_swap.trainer.stage_split import split_layers, usual_stages_per_rank
from activation_swap.trainer.stream import TokenStream

if TYPE_CHECKING:
    from activation_swap.trainer.config import Config
    from activation_swap.trainer.ranks import Ranks

__all__ = ["PipelineTrainer", "train_pipeline"]


class PipelineTrainer:
    """This rank's stages of a run, and the position in its data.

    Args:
        config: The run.
        ranks: This process among the others.

    Attributes:
        stages: The stage modules by the index of the stage.
        optimizer: Of this rank's weights.
        swap: The swap; inactive for ``activation_swap: none``.
        device: Where the stages are.
        done: Steps done.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self.device = ranks.device
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        per_rank = usual_stages_per_rank(config.schedule)
        orders = compute_orders(
            config.schedule,
            pp_size=config.pp_size,
            microbatches=config.microbatches,
            stages_per_rank=per_rank,
        )
        own = orders[ranks.pipeline.get_local_rank()]
        indices = sorted({member.stage for step in own for member in step.members})
        count = config.pp_size * per_rank
        self.stages = {index: self._build_stage(index, count) for index in indices}
        self.swap = registry.apply(
            config.activation_swap,
            [stage.model for stage in self.stages.values()],
            setup=TrainingSetup(pp_size=config.pp_size),
        )
        if ranks.data.size() > 1:
            for stage in self.stages.values():
                shard(stage, ranks.data)
        self._schedule = build_schedule(
            config.schedule,
            self.stages,
            count=count,
            microbatches=config.microbatches,
            device=self.device,
            group=ranks.pipeline.get_group(),
        )
        self.swap.attach(self._schedule)
        modules = nn.ModuleDict({str(index): stage for index, stage in self.stages.items()})
        self.optimizer = build_optimizer(modules, config.optimizer)
        self.done = 0
        vocabulary = next(iter(self.stages.values())).model.config.vocab_size
        self._stream = TokenStream(open_corpus(config.data, vocab_size=vocabulary))

    def step(self) -> StepResult:
        """Train on the next microbatches. Every rank returns the loss of all data."""
        tokens = self._next_microbatches()
        last = any(stage.last for stage in self.stages.values())
        first = any(stage.first for stage in self.stages.values())
        losses: list[torch.Tensor] = []
        synchronize(self.device)
        start = time.perf_counter()
        self._schedule.step(
            *((tokens,) if first else ()),
            target=tokens if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        self.done += 1
        return StepResult(loss=self._mean_loss(losses), seconds=seconds)

    def _build_stage(self, index: int, count: int) -> Stage:
        ends = {"first": index == 0, "last": index == count - 1}
        model = build_model(self._config.model, device=self.device, seed=self._config.seed)
        layers = split_layers(model.config.num_hidden_layers, count)[index]
        return Stage(prune(model, layers, **ends), **ends)

    def _next_microbatches(self) -> torch.Tensor:
        """Read the data of all pipelines, and keep that of this one."""
        rows = self._config.microbatches * self._config.batch_size
        taken = self._stream.take(
            batch_size=rows * self._ranks.data.size(), sequence_length=self._config.sequence_length
        )
        first = rows * self._ranks.data.get_local_rank()
        return taken[first : first + rows].to(self.device)

    def _mean_loss(self, losses: list[torch.Tensor]) -> float:
        """Average over microbatches and pipelines; ranks without the last stage add nothing."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (self._config.microbatches * self._ranks.data.size())


def train_pipeline(config: Config) -> float:
    """Train to the last step of the configuration; rank 0 writes ``metrics.jsonl``.

    Args:
        config: The run, with ``pp_size`` above 1.

    Returns:
        The loss of the last step.

    Raises:
        RejectedError: AS408 when the output directory holds an earlier run, AS412 when torchrun
            did not start these processes, AS415 when the directory cannot be written to, AS418 when
            another run writes there, AS508 when there is no such pipeline.
        SwapStateError: AS417 when the metrics cannot be written.
    """
    loss = float("nan")
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(device=config.device, pp_size=config.pp_size))
        stack.enter_context(determinism(enabled=config.deterministic))
        output = on_first_rank(lambda: _open_output(config))
        if output is not None:
            stack.enter_context(output)
        trainer = PipelineTrainer(config, ranks)
        metrics, advance = None, None
        if output is not None:
            metrics = MetricsFile(output.metrics)
            stack.callback(metrics.close)
            advance = stack.enter_context(step_progress("train", total=config.steps))
        while trainer.done < config.steps:
            result = trainer.step()
            loss = result.loss
            if metrics is not None and advance is not None:
                _record(metrics, trainer, result)
                advance(loss=loss)
            trainer.swap.reset_stats()
    return loss


def _open_output(config: Config) -> OutputDirectory:
    output = OutputDirectory(config.output)
    output.refuse_earlier_run(resumable=False)
    return output


def _record(metrics: MetricsFile, trainer: PipelineTrainer, result: StepResult) -> None:
    stats = trainer.swap.stats()
    metrics.write(
        step=trainer.done,
        loss=result.loss,
        seconds=result.seconds,
        peak_device_bytes=peak_device_bytes(trainer.device),
        offloaded_bytes=stats.offloaded_bytes,
        reloaded_bytes=stats.reloaded_bytes,
        reload_misses=stats.reload_misses,
        host_bytes_reserved=stats.host_bytes_reserved,
    )
