# SPDX-License-Identifier: Apache-2.0
"""What a rank computes under a schedule of torch, 2.11 to 2.14: read from one, or worked out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from activation_swap.core.schedule.actions import Action, Kind, Step
from activation_swap.core.schedule.orders import gpipe_order, one_f_one_b_order
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from activation_swap.core.schedule.actions import ComputeOrder

__all__ = ["compute_orders", "order_source", "read_order"]

_KINDS: Mapping[str, Kind] = {kind.name: kind for kind in Kind if len(kind.value) == 1}
"""Names of torch's compute kinds. Its values changed in 2.11; its names never did."""
_V_STAGES = 2


def read_order(schedule: Any) -> ComputeOrder | None:
    """Read what a schedule computes on this rank, or ``None`` where that cannot be known.

    The list of a multi-stage schedule is what it runs. Single-stage schedules run a loop instead:
    the loops of GPipe and 1F1B are known, any other is not.
    """
    if isinstance(schedule, PipelineScheduleSingle):
        order = _loop_order(schedule)
    else:
        order = _steps(_listed_actions(schedule))
    return order or None


def order_source(schedule: Any) -> object:
    """Return what :func:`read_order` reads, to compare: the same list is equal at no cost."""
    if isinstance(schedule, PipelineScheduleSingle):
        return schedule._n_microbatches
    actions = _listed_actions(schedule)
    return actions, len(actions)


def compute_orders(
    name: str, *, pp_size: int, microbatches: int, stages_per_rank: int
) -> dict[int, ComputeOrder]:
    """Compute what a schedule of torch would run, without processes.

    Args:
        name: Name of the schedule class as ``get_schedule_class`` knows it.
        pp_size: Number of ranks.
        microbatches: Number of microbatches.
        stages_per_rank: Number of stages on each rank; one for single-stage schedules.

    Returns:
        The compute order by rank.

    Raises:
        RejectedError: AS508 when there is no such schedule, or not of this shape.
    """
    problem = _shape_problem(name, pp_size * stages_per_rank, stages_per_rank, microbatches)
    if problem is not None:
        raise Reason.NO_SUCH_PIPELINE.error(found=problem, where=f"schedule: {name}")
    kind = torch_schedules.get_schedule_class(name)
    if kind is ScheduleGPipe:
        return {r: gpipe_order(stage=r, microbatches=microbatches) for r in range(pp_size)}
    if kind is Schedule1F1B:
        return {
            r: one_f_one_b_order(stage=r, stages=pp_size, microbatches=microbatches)
            for r in range(pp_size)
        }
    rounds = max(1, microbatches // pp_size)
    # What the generators read of a schedule. Building one would take stages and processes.
    shape = SimpleNamespace(
        pp_group_size=pp_size,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
        n_local_stages=stages_per_rank,
        num_stages=pp_size * stages_per_rank,
        _num_stages=pp_size * stages_per_rank,
        _n_microbatches=microbatches,
        _stages=[None] * stages_per_rank,
    )
    return {
        rank: _steps(kind._calculate_single_rank_operations(shape, rank)) for rank in range(pp_size)
    }


def _shape_problem(name: str, stages: int, stages_per_rank: int, microbatches: int) -> str | None:
    """Check what the constructors of torch check, which also ask for stages and processes."""
    try:
        kind = torch_schedules.get_schedule_class(name)
    except ValueError as error:
        return str(error)
    rounds = max(1, microbatches * stages_per_rank // stages)
    single = issubclass(kind, PipelineScheduleSingle)
    folded = kind in {ScheduleZBVZeroBubble, ScheduleDualPipeV}
    filled = kind in {Schedule1F1B, ScheduleDualPipeV}
    rounded = kind in {ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble}
    per_rank = f"{stages_per_rank} stages per rank"
    problems = (
        (kind in {PipelineScheduleSingle, PipelineScheduleMulti}, "an abstract class"),
        (single and stages_per_rank != 1, f"{per_rank}, where this schedule has one"),
        (folded and stages_per_rank != _V_STAGES, f"{per_rank}, where this schedule has two"),
        (filled and microbatches < stages, f"{microbatches} microbatches for {stages} stages"),
        (
            rounded and microbatches % rounds != 0,
            f"{microbatches} microbatches, not a multiple of {rounds} rounds",
        ),
    )
    return next((text for holds, text in problems if holds), None)


def _loop_order(schedule: Any) -> ComputeOrder | None:
    loop = type(schedule)._step_microbatches
    stage, microbatches = schedule._stage, schedule._n_microbatches
    if loop is ScheduleGPipe._step_microbatches:
        return gpipe_order(stage=stage.stage_index, microbatches=microbatches)
    if loop is Schedule1F1B._step_microbatches:
        return one_f_one_b_order(
            stage=stage.stage_index, stages=stage.num_stages, microbatches=microbatches
        )
    return None


def _listed_actions(schedule: Any) -> Sequence[Any]:
    """Prefer what the runtime walks: a CSV with communication fills only that list."""
    for name in ("pipeline_order_with_comms", "pipeline_order"):
        actions: Sequence[Any] | None = getattr(schedule, name, {}).get(schedule.rank)
        if actions:
            return actions
    return ()


def _steps(actions: Iterable[Any]) -> ComputeOrder:
    """Drop bubbles, communication and whatever else is not compute."""
    steps = []
    for action in actions:
        if action is None:
            continue
        members = action.sub_actions or (action,)
        compute = tuple(
            Action(member.stage_index, kind, member.microbatch_index)
            for member in members
            if (kind := _KINDS.get(member.computation_type.name)) is not None
        )
        if compute:
            steps.append(Step(compute))
    return tuple(steps)
