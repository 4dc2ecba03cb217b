# SPDX-License-Identifier: Apache-2.0
"""``compare`` under torchrun: none against attention, rank by rank."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from activation_swap import SwapStats
from activation_swap.trainer.device import determinism
from activation_swap.trainer.measure import measure_steps
from activation_swap.trainer.output import OutputDirectory
from activation_swap.trainer.pipeline import PipelineTrainer
from activation_swap.trainer.progress import step_progress
from activation_swap.trainer.ranks import join_ranks, on_first_rank
from activation_swap.trainer.rendering import rank_table
from activation_swap.trainer.report import (
    NOT_FINITE,
    NOTHING_MOVED,
    finite_losses,
    first_difference,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from activation_swap import Mode
    from activation_swap.trainer.config import Config
    from activation_swap.trainer.measure import Measurement
    from activation_swap.trainer.ranks import Ranks

__all__ = ["PipelineReport", "RankReport", "compare_pipeline"]

_TABLE_WIDTH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank of a comparison. Bytes are of the timed steps.

    Attributes:
        rank: Which process.
        stages: Its stages.
        losses_equal: Loss of every step bitwise equal in both modes.
        losses_finite: No loss of either mode is infinite or not a number.
        gradients_equal: Every gradient of the digested steps bitwise equal.
        baseline_repeats: Whether two runs of ``none`` were bitwise equal; ``None`` if not asked.
        gradients: How many were compared.
        offloaded_bytes: Crossed the link to the host.
        reloaded_bytes: Crossed it back.
        reload_misses: Groups that no prefetch had reloaded in time.
        late_releases: Groups whose backward began before their memory was given up.
        waited_seconds: What compute waited for copies in a step; ``None`` where no device tells.
        hiding_fraction: The ``SwapPolicy.fraction`` at which it would not wait; likewise.
        resident_saved_bytes_peak: Largest device bytes of eligible saved tensors, with the swap.
        host_bytes_reserved: Pinned host memory at the end.
        step_seconds: Median step by mode.
        peak_device_bytes: The allocator's peak by mode; ``None`` on a CPU.
        device: Its name.
    """

    rank: int
    stages: tuple[int, ...]
    losses_equal: bool
    losses_finite: bool
    gradients_equal: bool
    baseline_repeats: bool | None
    gradients: int
    offloaded_bytes: int
    reloaded_bytes: int
    reload_misses: int
    late_releases: int
    waited_seconds: float | None
    hiding_fraction: float | None
    resident_saved_bytes_peak: int | None
    host_bytes_reserved: int
    step_seconds: dict[Mode, float]
    peak_device_bytes: dict[Mode, int | None]
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReport:
    """All ranks of a comparison.

    Attributes:
        losses_equal: On every rank.
        losses_finite: On every rank.
        gradients_equal: On every rank.
        baseline_repeats: On every rank; ``None`` if not asked.
        offloaded_bytes: Of all ranks, over the timed steps.
        ranks: By rank.
        config: The run.
    """

    losses_equal: bool
    losses_finite: bool
    gradients_equal: bool
    baseline_repeats: bool | None
    offloaded_bytes: int
    ranks: tuple[RankReport, ...]
    config: dict[str, Any]

    @classmethod
    def of(cls, ranks: Sequence[RankReport], *, config: dict[str, Any]) -> Self:
        """Put the ranks, one or more, together."""
        asked = all(rank.baseline_repeats is not None for rank in ranks)
        return cls(
            losses_equal=all(rank.losses_equal for rank in ranks),
            losses_finite=all(rank.losses_finite for rank in ranks),
            gradients_equal=all(rank.gradients_equal for rank in ranks),
            baseline_repeats=all(rank.baseline_repeats for rank in ranks) if asked else None,
            offloaded_bytes=sum(rank.offloaded_bytes for rank in ranks),
            ranks=tuple(ranks),
            config=config,
        )

    @property
    def passed(self) -> bool:
        """Whether bytes moved and nothing speaks against the swap here.

        A difference counts only where ``none`` repeats its own bits.
        """
        equal = self.losses_equal and self.gradients_equal
        told = self.offloaded_bytes > 0 and self.losses_finite
        return told and (equal or self.baseline_repeats is False)


def compare_pipeline(config: Config) -> PipelineReport:
    """Measure both modes on every rank; rank 0 writes ``report.json`` and prints.

    Unlike a comparison on one device, both modes run in the same processes, one after the other:
    a group of processes is joined once.

    Args:
        config: The run, with ``pp_size`` above 1.

    Returns:
        The same report on every rank.

    Raises:
        RejectedError: AS412 when torchrun did not start these processes, AS416 when the head is
            tied to the embedding, AS415 when the output directory cannot be written to, AS418 when
            another run writes there, AS508 when there is no such pipeline.
        SwapStateError: AS417 when the report cannot be written.
        OutOfMemoryError: By torch: the other ranks wait for one that ran out, so that it cannot be
            a result as it is on one device.
    """
    with (
        join_ranks(device=config.device, pp_size=config.pp_size) as ranks,
        determinism(enabled=config.deterministic),
        ExitStack() as stack,
    ):
        output = on_first_rank(lambda: OutputDirectory(config.output))
        if output is not None:
            stack.enter_context(output)
        stages, baseline = _measure(config, "none", ranks)
        repeated = _measure(config, "none", ranks)[1] if config.compare.repeat_baseline else None
        _, swapped = _measure(config, "attention", ranks)
        own = _rank_report(stages, baseline=baseline, repeated=repeated, swapped=swapped)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
        report = PipelineReport.of(reports, config=config.model_dump(mode="json"))
        if output is not None:
            text = json.dumps(asdict(report), indent=2) + "\n"
            output.replace_report({"report.json": lambda path: path.write_text(text, "utf-8")})
            _show(report)
    return report


def _measure(config: Config, mode: Mode, ranks: Ranks) -> tuple[tuple[int, ...], Measurement]:
    compare = config.compare
    total = compare.digest_steps + compare.warmup_steps + compare.timed_steps
    trainer = PipelineTrainer(config.model_copy(update={"activation_swap": mode}), ranks)
    if dist.get_rank() == 0:
        with step_progress(f"{mode:>9}", total=total) as advance:
            measured = measure_steps(trainer, config, mode, advance)
    else:
        measured = measure_steps(trainer, config, mode, _silent)
    stages = tuple(trainer.stages)
    trainer.swap.remove()
    del trainer
    gc.collect()  # a schedule and its stages refer to each other
    if ranks.device.type != "cpu":
        torch.accelerator.empty_cache()
    return stages, measured


def _silent(*, loss: float) -> None:
    """Show nothing: one rank shows the progress of all."""


def _rank_report(
    stages: tuple[int, ...],
    *,
    baseline: Measurement,
    repeated: Measurement | None,
    swapped: Measurement,
) -> RankReport:
    modes: dict[Mode, Measurement] = {"none": baseline, "attention": swapped}
    stats = swapped.stats or SwapStats()
    return RankReport(
        rank=dist.get_rank(),
        stages=stages,
        losses_equal=[x.hex() for x in baseline.losses] == [x.hex() for x in swapped.losses],
        losses_finite=finite_losses(baseline, swapped),
        gradients_equal=baseline.gradients == swapped.gradients,
        baseline_repeats=None if repeated is None else first_difference(baseline, repeated) is None,
        gradients=sum(map(len, swapped.gradients)),
        offloaded_bytes=stats.offloaded_bytes,
        reloaded_bytes=stats.reloaded_bytes,
        reload_misses=stats.reload_misses,
        late_releases=stats.late_releases,
        waited_seconds=swapped.waited_seconds,
        hiding_fraction=swapped.hiding_fraction,
        resident_saved_bytes_peak=swapped.resident_saved_bytes_peak,
        host_bytes_reserved=stats.host_bytes_reserved,
        step_seconds={
            mode: m.step_time.median for mode, m in modes.items() if m.step_time is not None
        },
        peak_device_bytes={mode: m.peak_device_bytes for mode, m in modes.items()},
        device=swapped.device,
    )


def _show(report: PipelineReport) -> None:
    shown = Table(box=box.SIMPLE_HEAD, title=f"activation_swap under {report.config['schedule']}")
    columns = rank_table(report.ranks)
    for name in columns:
        shown.add_column(name, justify="right")
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    terminal = Console()
    console = Console(width=max(terminal.width, _TABLE_WIDTH))
    console.print(shown)
    console.print(f"losses equal: {report.losses_equal}, gradients: {report.gradients_equal}")
    if report.baseline_repeats is not None:
        console.print(f"none repeats its own bits: {report.baseline_repeats}")
    if not report.offloaded_bytes:
        console.print(NOTHING_MOVED)
    if not report.losses_finite:
        console.print(NOT_FINITE)
