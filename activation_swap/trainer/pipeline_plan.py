# SPDX-License-Identifier: Apache-2.0
"""What a pipeline would gain from the swap: predicted, rank by rank, without running it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Kind, LoweredStep
from activation_swap.core.schedule.decision import decide
from activation_swap.core.schedule.liveness import find_chunks
from activation_swap.core.schedule.lowering import lower
from activation_swap.core.schedule.simulation import in_flight, residency
from activation_swap.core.schedule.torch_orders import compute_orders
from activation_swap.core.swap_plan import spread
from activation_swap.trainer.pipeline_time import simulate_time
from activation_swap.trainer.stage_split import split_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.actions import Action, ComputeOrder
    from activation_swap.core.schedule.liveness import ChunkLife
    from activation_swap.trainer.attention_bytes import AttentionBytes

__all__ = ["LinkPlan", "PipelinePlan", "PipelineSetup", "RankPlan", "plan_pipeline"]


def _durations(stage: int) -> Mapping[Kind, float]:
    """Time of one layer, in forwards: a backward computes two gradients for the forward's one."""
    first = stage == 0  # has no input gradient to compute: its split backward runs in W
    return {
        Kind.FORWARD: 1.0,
        Kind.FULL_BACKWARD: 2.0,
        Kind.BACKWARD_INPUT: 0.0 if first else 1.0,
        Kind.BACKWARD_WEIGHT: 2.0 if first else 1.0,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSetup:
    """What is to be planned.

    Attributes:
        schedule: Name of a schedule of ``torch.distributed.pipelining``.
        pp_size: Number of ranks.
        stages_per_rank: Number of stages on each rank.
        microbatches: Microbatches per step.
        layers: Decoder layers of the model.
        attention: Bytes of one attention of one microbatch.
        fraction: Part of the attentions that moves, as in ``SwapPolicy``.
        other_bytes: What else one layer of one microbatch keeps on the device for backward.
        link_bytes_per_second: Rate of the link in each direction while both are in use.
        step_seconds: Time of a step without the swap, or ``None`` when it is not known.
    """

    schedule: str
    pp_size: int
    stages_per_rank: int
    microbatches: int
    layers: int
    attention: AttentionBytes
    fraction: float = 1.0
    other_bytes: int = 0
    link_bytes_per_second: float
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPlan:
    """How a rank's copies fit beside its compute.

    Attributes:
        utilisation: Part of the step in which one direction of the link is busy.
        copies_hide: Whether each copy is shorter than the compute beside it.
        stall_seconds: Time by which copies are longer than the compute beside them, per step.
    """

    utilisation: float
    copies_hide: bool
    stall_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """One rank of the plan.

    Attributes:
        rank: Which.
        layers: Number of layers, by stage.
        moved_chunks: Chunks that move whole.
        moved_but_tail_chunks: Chunks that move but for their last attention.
        kept_chunks: Chunks that stay, because moving them would not lower the peak.
        chunks_in_flight_peak: Most chunks between forward and backward at one time.
        resident_groups_peak_none: Most attention groups on the device without the swap.
        resident_groups_peak: The same with it.
        peak_bytes_none: Device bytes at the peak without the swap: attention and the rest.
        peak_bytes: The same with it.
        saved_bytes_at_peak: By how much the peak falls.
        offloaded_bytes_per_step: What crosses the link, once in each direction.
        busy: Part of the step in which the rank computes; the rest is bubbles.
        hiding_step_seconds: The shortest step in which every copy of the rank hides; ``None`` when
            it moves nothing.
        link: How the copies fit, or ``None`` when the step time is not known.
        resident_groups_none: Attention groups on the device during each step, without the swap.
        resident_groups: The same with it.
        steps: The lowered schedule.
    """

    rank: int
    layers: dict[int, int]
    moved_chunks: int
    moved_but_tail_chunks: int
    kept_chunks: int
    chunks_in_flight_peak: int
    resident_groups_peak_none: int
    resident_groups_peak: int
    peak_bytes_none: int
    peak_bytes: int
    saved_bytes_at_peak: int
    offloaded_bytes_per_step: int
    busy: float
    hiding_step_seconds: float | None
    link: LinkPlan | None
    resident_groups_none: tuple[int, ...]
    resident_groups: tuple[int, ...]
    steps: tuple[LoweredStep, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """A plan for all ranks.

    Attributes:
        setup: What was planned.
        hiding_step_seconds: The shortest step in which every copy hides; ``None`` when nothing
            moves.
        ranks: By rank.
    """

    setup: PipelineSetup
    hiding_step_seconds: float | None
    ranks: tuple[RankPlan, ...]


def plan_pipeline(setup: PipelineSetup) -> PipelinePlan:
    """Plan every rank of a pipeline.

    Raises:
        RejectedError: AS508 when there is no such schedule, or not of this shape.
    """
    orders = compute_orders(
        setup.schedule,
        pp_size=setup.pp_size,
        microbatches=setup.microbatches,
        stages_per_rank=setup.stages_per_rank,
    )
    split = split_layers(setup.layers, setup.pp_size * setup.stages_per_rank)
    layers = {stage: len(numbers) for stage, numbers in enumerate(split)}
    intervals = simulate_time(orders, lambda action: _duration(action, layers))
    makespan = max(steps[-1].end for steps in intervals.values())
    moving: dict[int, list[int]] = {}
    for order in orders.values():
        moving |= _moving_layers(order, layers, setup)
    ranks = tuple(
        _plan_rank(
            rank,
            order,
            layers=layers,
            moving=moving,
            setup=setup,
            makespan=makespan,
        )
        for rank, order in sorted(orders.items())
    )
    hiding = [rank.hiding_step_seconds for rank in ranks if rank.hiding_step_seconds is not None]
    return PipelinePlan(setup=setup, hiding_step_seconds=max(hiding, default=None), ranks=ranks)


def _moving_layers(
    order: ComputeOrder, layers: Mapping[int, int], setup: PipelineSetup
) -> dict[int, list[int]]:
    """Return the layers of a rank whose attention may move, by stage."""
    own = sorted({member.stage for step in order for member in step.members})
    stages = [stage for stage in own for _ in range(layers[stage])]
    moving: dict[int, list[int]] = {stage: [] for stage in own}
    # All that an attention saves may be too small to move.
    numbers = spread(stages, setup.fraction) if setup.attention.link else ()
    for number in sorted(numbers):
        moving[stages[number]].append(number)
    return moving


def _spacing(moving: Sequence[int], layers: int) -> int:
    """Return the fewest layers from one moving attention to the next: a copy runs beside them."""
    return min((after - before for before, after in pairwise(moving)), default=layers)


def _duration(action: Action, layers: Mapping[int, int]) -> float:
    return _durations(action.stage)[action.kind] * layers[action.stage]


def _plan_rank(
    rank: int,
    order: ComputeOrder,
    *,
    layers: Mapping[int, int],
    moving: Mapping[int, Sequence[int]],
    setup: PipelineSetup,
    makespan: float,
) -> RankPlan:
    chunks = find_chunks(order)
    steps = len(order)
    counts = {stage: len(numbers) for stage, numbers in moving.items()}
    keeps = decide(chunks, attentions=counts, steps=steps)
    without = in_flight(chunks, weights=layers, steps=steps)
    spared = in_flight(chunks, weights=counts, steps=steps)
    resident = residency(chunks, keeps, attentions=counts, steps=steps)
    planned = [a - b + c for a, b, c in zip(without, spared, resident, strict=True)]
    ones = dict.fromkeys(layers, 1)
    peak_none = _peak_bytes(without, without, setup)
    peak = _peak_bytes(planned, without, setup)
    chosen = Counter(keeps.values())
    moved = [(chunk, count) for chunk, count in _moved_groups(chunks, keeps, counts) if count]
    spacing = {stage: _spacing(numbers, layers[stage]) for stage, numbers in moving.items()}
    return RankPlan(
        rank=rank,
        layers={stage: layers[stage] for stage in sorted({c.key.stage for c in chunks})},
        moved_chunks=chosen[Keep.NOTHING],
        moved_but_tail_chunks=chosen[Keep.TAIL],
        kept_chunks=chosen[Keep.ALL],
        chunks_in_flight_peak=max(in_flight(chunks, weights=ones, steps=steps)),
        resident_groups_peak_none=max(without),
        resident_groups_peak=max(planned),
        peak_bytes_none=peak_none,
        peak_bytes=peak,
        saved_bytes_at_peak=peak_none - peak,
        offloaded_bytes_per_step=setup.attention.link * sum(count for _, count in moved),
        # Not from begin to end of each step: the members of one step may wait for other ranks.
        busy=sum(_duration(member, layers) for step in order for member in step.members) / makespan,
        hiding_step_seconds=_hiding(moved, spacing=spacing, setup=setup, makespan=makespan),
        link=_plan_link(moved, spacing=spacing, setup=setup, makespan=makespan),
        resident_groups_none=tuple(without),
        resident_groups=tuple(planned),
        steps=lower(order, chunks, keeps),
    )


def _peak_bytes(groups: Sequence[int], flight: Sequence[int], setup: PipelineSetup) -> int:
    """Peak of the resident groups and of what else the layers in flight hold."""
    return max(
        moving * setup.attention.device + staying * setup.other_bytes
        for moving, staying in zip(groups, flight, strict=True)
    )


def _moved_groups(
    chunks: Sequence[ChunkLife], keeps: Mapping[GroupKey, Keep], counts: Mapping[int, int]
) -> Iterator[tuple[ChunkLife, int]]:
    """Yield every chunk with the number of its attention groups that cross the link."""
    for chunk in chunks:
        count, keep = counts[chunk.key.stage], keeps[chunk.key]
        staying = {Keep.NOTHING: 0, Keep.TAIL: 1, Keep.ALL: count}[keep]
        yield chunk, count - staying


def _hiding(
    moved: Sequence[tuple[ChunkLife, int]],
    *,
    spacing: Mapping[int, int],
    setup: PipelineSetup,
    makespan: float,
) -> float | None:
    """Return the step in which each copy takes as long as the forward of the layers beside it."""
    closest = min((spacing[chunk.key.stage] for chunk, _ in moved), default=None)
    copy = setup.attention.link / setup.link_bytes_per_second
    return None if closest is None else copy * makespan / closest


def _plan_link(
    moved: Sequence[tuple[ChunkLife, int]],
    *,
    spacing: Mapping[int, int],
    setup: PipelineSetup,
    makespan: float,
) -> LinkPlan | None:
    """Compare each attention's copies with the compute of the layers that they run beside.

    The offload runs beside the forward of the layers up to the next attention that moves, the
    reload beside their backward, or its input gradient where the schedule splits the backward.
    """
    if setup.step_seconds is None:
        return None
    groups = sum(count for _, count in moved)
    copy = setup.attention.link / setup.link_bytes_per_second
    forward = setup.step_seconds / makespan
    stall = 0.0
    for chunk, count in moved:
        split = chunk.last_use > chunk.first_use
        ahead = forward * spacing[chunk.key.stage]
        behind = ahead * (1.0 if split else 2.0)
        stall += count * (max(0.0, copy - ahead) + max(0.0, copy - behind))
    return LinkPlan(
        utilisation=groups * copy / setup.step_seconds,
        copies_hide=stall == 0.0,
        stall_seconds=stall,
    )
