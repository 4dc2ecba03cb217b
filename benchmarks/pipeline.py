# SPDX-License-Identifier: Apache-2.0
r"""A pipeline over the ranks of torchrun: ``none``, ``attention`` and ``none`` again at each point.

All points of a launch share one set of layers for each rank; a point only groups them into stages.
With fewer pipeline ranks than processes, each stage is sharded with FSDP2 over the others::

    torchrun --nproc-per-node=2 -m benchmarks.pipeline --name pipeline-2 --out out/gpus \
        --pp-size 2 --layers 24 Interleaved1F1B:2x8x2048 GPipe:1x8x2048

Gradients are freed inside backward, so that weights and activations are what a rank holds.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from activation_swap import Swap, SwapPolicy, TrainingSetup, registry
from activation_swap.core.schedule.torch_orders import compute_orders
from activation_swap.trainer.device import (
    determinism,
    peak_device_bytes,
    reset_peak_device_bytes,
    synchronize,
)
from activation_swap.trainer.ranks import join_ranks
from activation_swap.trainer.stage import Stage, prune, shard
from activation_swap.trainer.stage_schedule import build_schedule
from activation_swap.trainer.stage_split import split_layers
from benchmarks.gradients import GradientSink
from benchmarks.model import build
from benchmarks.pipeline_points import PipelinePoint, expected_peak, plan_point
from benchmarks.rank_figures import combine, planned_figures, reserved_bytes, swap_figures
from benchmarks.ranks import Records, add_rank_options, describe_ranks, free_memory, gather, set_up

if TYPE_CHECKING:
    from activation_swap.trainer.pipeline_plan import RankPlan
    from activation_swap.trainer.ranks import Ranks

_MODES: Final = ("none", "attention", "none")
_USABLE: Final = 0.97
"""Part of the device's memory that a prediction may fill."""


@dataclass(kw_only=True)
class _Pipeline:
    """One point, ready to step on this rank."""

    point: PipelinePoint
    stages: dict[int, Stage]
    schedule: Any
    sink: GradientSink
    planned: RankPlan
    tokens: torch.Tensor
    device: torch.device
    pp_size: int

    def apply(self, mode: str, policy: dict[str, Any]) -> Swap:
        """Put a mode on the stages."""
        swap = registry.apply(
            mode,
            [stage.model for stage in self.stages.values()],
            setup=TrainingSetup(pp_size=self.pp_size),
            policy=SwapPolicy(**policy),
        )
        swap.attach(self.schedule)
        return swap

    def step(self) -> tuple[float, list[torch.Tensor]]:
        """Train on all microbatches; return milliseconds, and the losses on the last stage."""
        last = any(stage.last for stage in self.stages.values())
        first = any(stage.first for stage in self.stages.values())
        losses: list[torch.Tensor] = []
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        self.schedule.step(
            *((self.tokens,) if first else ()),
            target=self.tokens if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        self.sink.sweep()
        synchronize(self.device)
        elapsed = 1e3 * (time.perf_counter() - began)
        return elapsed, [loss.detach() for loss in losses]


def _build(options: argparse.Namespace, ranks: Ranks) -> Any:
    """Build the layers of this rank: the same on all that compute the same stages."""
    seed = ranks.pipeline.get_local_rank()
    return build(options.shape, device=str(ranks.device), layers=options.layers, seed=seed)


def _prepare(
    point: PipelinePoint, model: Any, options: argparse.Namespace, ranks: Ranks
) -> _Pipeline:
    """Group the rank's layers into the stages of a point.

    Sharding gives whole weights up: then each point builds its own.
    """
    gc.collect()
    if model is None:
        model = _build(options, ranks)
    pp_size, own = ranks.pipeline.size(), ranks.pipeline.get_local_rank()
    orders = compute_orders(
        point.schedule,
        pp_size=pp_size,
        microbatches=point.microbatches,
        stages_per_rank=point.stages_per_rank,
    )
    indices = sorted({member.stage for step in orders[own] for member in step.members})
    count = pp_size * point.stages_per_rank
    split = split_layers(options.layers, point.stages_per_rank)
    stages = {}
    for index, layers in zip(indices, split, strict=True):
        ends = {"first": index == 0, "last": index == count - 1}
        stages[index] = Stage(prune(_same_weights(model), layers, **ends), **ends)
        if ranks.data.size() > 1:
            shard(stages[index], ranks.data)
    config = next(iter(stages.values())).model.config
    generator = torch.Generator(ranks.device).manual_seed(1 + ranks.data.get_local_rank())
    shape = (point.microbatches, point.tokens)
    named = {"shape": options.shape, "layers": options.layers, "policy": options.policy}
    return _Pipeline(
        point=point,
        stages=stages,
        schedule=build_schedule(
            point.schedule,
            stages,
            count=count,
            microbatches=point.microbatches,
            device=ranks.device,
            group=ranks.pipeline.get_group(),
        ),
        sink=GradientSink(
            {
                f"{index}.{name}": parameter
                for index, stage in stages.items()
                for name, parameter in stage.named_parameters()
            }
        ),
        planned=plan_point(point, config, pp_size=pp_size, **named).ranks[own],
        tokens=torch.randint(config.vocab_size, shape, device=ranks.device, generator=generator),
        device=ranks.device,
        pp_size=pp_size,
    )


def _same_weights(model: Any) -> Any:
    """Copy the modules and share their weights."""
    tensors = (*model.parameters(), *model.buffers())
    return deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _lack_of_memory(pipeline: _Pipeline, mode: str) -> str | None:
    """Return why the point will not fit on some rank, the same on all, or ``None``.

    A rank that runs out of memory leaves its peers in a receive. So what is sure to is not begun.
    """
    if pipeline.device.type == "cpu":
        return None
    last = next((stage for stage in pipeline.stages.values() if stage.last), None)
    peak = expected_peak(
        pipeline.point,
        pipeline.planned,
        mode=mode,
        weights=torch.accelerator.memory_allocated(),
        vocabulary=None if last is None else last.model.config.vocab_size,
    )
    _, total = torch.get_device_module(pipeline.device).mem_get_info()
    peak, total = max(gather((peak, total)))
    if peak <= _USABLE * total:
        return None
    return f"not begun: about {peak / 2**30:.0f} GiB expected, of {total / 2**30:.0f} GiB"


def _measure(pipeline: _Pipeline, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode, and return the figures of all ranks."""
    swap = pipeline.apply(mode, options.policy)
    try:
        pipeline.sink.begin()
        with determinism(enabled=True):
            _, digested = pipeline.step()
        digest, gradients = pipeline.sink.finish()
        for _ in range(options.warmup - 1):
            pipeline.step()
        swap.reset_stats()
        reset_peak_device_bytes(pipeline.device)
        steps = [pipeline.step() for _ in range(options.steps)]
        own = {
            "rank": dist.get_rank(),
            "stages": list(pipeline.stages),
            "step_ms_all": [elapsed for elapsed, _ in steps],
            "peak_bytes": peak_device_bytes(pipeline.device),
            "peak_reserved_bytes": reserved_bytes(pipeline.device),
            "losses": [
                float(loss) for losses in (digested, *(own for _, own in steps)) for loss in losses
            ],
            "gradient_digest": digest,
            "gradients": gradients,
            **swap_figures(swap, options.steps),
            "planned": planned_figures(pipeline.planned),
        }
    finally:
        swap.remove()
    return combine(gather(own))


def _measure_point(
    point: PipelinePoint, model: Any, options: argparse.Namespace, ranks: Ranks, records: Records
) -> bool:
    """Measure the modes of a point that have no record yet; ``False`` when time is up."""
    stem = f"{options.name}-{str(point).replace(':', '-')}"
    names = [f"{stem}-{position}-{mode}" for position, mode in enumerate(_MODES)]
    outcomes = [records.outcome(name) for name in names]
    if None not in outcomes:
        return True
    if not records.time_left():
        return False
    pipeline = _prepare(point, model, options, ranks)
    facts = {
        **asdict(point),
        "layers": options.layers * pipeline.pp_size,
        "data_ranks": ranks.data.size(),
        "policy": options.policy,
    }
    with closing(pipeline.sink):
        for position, (name, mode) in enumerate(zip(names, _MODES, strict=True)):
            job = {"mode": mode, "repeat": _MODES[:position].count(mode), "point": facts}
            # What did not run once does not run again.
            if outcomes[position] is not None or (
                job["repeat"] and outcomes[_MODES.index(mode)] != "measured"
            ):
                continue
            if not records.time_left():
                return False
            outcomes[position] = _measure_mode(pipeline, name, job, options, records)
    return True


def _measure_mode(
    pipeline: _Pipeline,
    name: str,
    job: dict[str, Any],
    options: argparse.Namespace,
    records: Records,
) -> str:
    """Measure one mode if it will fit; return the outcome."""
    gc.collect()
    free_memory(pipeline.device)
    lack = _lack_of_memory(pipeline, job["mode"])
    if lack is not None:
        if dist.get_rank() == 0:
            records.write(name, job, {"outcome": "out of memory", "reason": lack})
            print(f"{name}: {lack}", flush=True)
        return "out of memory"
    with records.measurement(name, job) as figures:
        figures.update(_measure(pipeline, job["mode"], options))
    return "measured"


def main() -> None:
    """Measure the points, as long as there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rank_options(parser)
    parser.add_argument("--pp-size", type=int, required=True, help="ranks of a pipeline")
    parser.add_argument("points", nargs="+", type=PipelinePoint.parse, metavar="POINT")
    options = parser.parse_args()
    with join_ranks(device=options.device, pp_size=options.pp_size) as ranks:
        set_up(ranks.device)
        options.out.mkdir(parents=True, exist_ok=True)
        records = Records.of(
            options,
            describe_ranks(ranks.device),
            optimizer="none: gradients are freed inside backward",
        )
        model = _build(options, ranks) if ranks.data.size() == 1 else None
        for point in options.points:
            if not _measure_point(point, model, options, ranks, records):
                break


if __name__ == "__main__":
    main()
