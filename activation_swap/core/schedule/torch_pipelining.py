"""Everything that depends on the inside of ``torch.distributed.pipelining``, 2.11 to 2.14.

Read, never written: what a schedule will compute on this rank. Wrapped on the instance, and
restored on detach: the three methods of a stage that every schedule calls for compute, and the one
that it calls when a step begins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
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
from activation_swap.core.schedule.liveness import find_order_problem
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.orders import gpipe_order, one_f_one_b_order
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from activation_swap._verbs import GroupVerbs
    from activation_swap.core.schedule.actions import ComputeOrder, LoweredStep
    from activation_swap.core.site import HookedSite

__all__ = ["Attachment", "attach", "compute_orders", "read_order"]

_KINDS: Mapping[str, Kind] = {kind.name: kind for kind in Kind if len(kind.value) == 1}
"""Names of torch's compute kinds. Its values changed in 2.11; its names never did."""
_FULL_BACKWARD = 2
"""Position of ``full_backward`` in ``backward_one_chunk(chunk, loss, full_backward, ...)``."""
_V_STAGES = 2


def attach(
    schedule: Any,
    verbs: GroupVerbs,
    *,
    sites: Sequence[HookedSite],
    recorded: Collection[int],
    replaces: Attachment | None = None,
) -> Attachment:
    """Let a schedule drive the groups of its stages.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining``.
        verbs: What moves the groups.
        sites: The attention modules of this rank.
        recorded: Positions of those that move; the plan counts no others.
        replaces: The attachment that gives way, once nothing can be refused any more.

    Returns:
        A handle whose :meth:`Attachment.detach` restores the stages.

    Raises:
        RejectedError: AS504 when an attention is in no stage of the schedule, AS506 when
            ``schedule`` is not a schedule.
        SwapStateError: AS505 when a stage follows another attachment than ``replaces``.
    """
    stages = _stages(schedule)
    if stages is None:
        raise Reason.NOT_A_SCHEDULE.error(
            found=f"{type(schedule).__module__}.{type(schedule).__qualname__}"
        )
    modules = {stage.stage_index: set(stage.submod.modules()) for stage in stages}
    outside = [site.fqn for site in sites if not any(site.module() in m for m in modules.values())]
    if outside or not sites:
        raise Reason.SCHEDULE_MISSES_SITES.error(
            found=f"{len(outside)} of {len(sites)} swapped attentions in no stage",
            where=outside[0] if outside else None,
        )
    for stage in stages:
        calls = [call for call in vars(stage).values() if isinstance(call, _StageCall)]
        if not all(replaces is not None and replaces.owns(call) for call in calls):
            raise Reason.SCHEDULE_ATTACHED.error(found=f"stage {stage.stage_index} is attached")
    if replaces is not None:
        replaces.detach()
    moving = [site.module() for order, site in enumerate(sites) if order in recorded]
    attentions = {
        index: sum(module in inside for module in moving) for index, inside in modules.items()
    }
    return Attachment(schedule, stages, verbs, attentions)


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


class Attachment:
    """The wrappers on the stages of one schedule.

    Args:
        schedule: The schedule to follow.
        stages: Its stages on this rank.
        verbs: What moves the groups.
        attentions: Number of attentions that move, by stage.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[Any],
        verbs: GroupVerbs,
        attentions: Mapping[int, int],
    ) -> None:
        # Modules reach this through their hooks, and schedules hold modules: none of it keeps the
        # model alive.
        self._schedule = ref(schedule)
        self._attentions = attentions
        self._deferred = frozenset(stage.stage_index for stage in stages if stage.dw_builder)
        self._runner = ScheduleRunner(verbs)
        self._source: object = None
        self._plan: tuple[LoweredStep, ...] | None = None
        # Every schedule clears its stages one after the other when a step begins.
        self._calls: list[_StageCall] = [_BeginCall(stages[0], "clear_runtime_states", self._begin)]
        for stage in stages:
            self._calls += [
                _ForwardCall(stage, "forward_one_chunk", self._runner),
                _BackwardCall(stage, "backward_one_chunk", self._runner),
                _WeightCall(stage, "backward_weight_one_chunk", self._runner),
            ]

    @property
    def plan(self) -> tuple[LoweredStep, ...] | None:
        """The plan that steps follow, or ``None`` while their order is not known."""
        return self._plan

    def owns(self, call: _StageCall) -> bool:
        """Whether a wrapper is one of this attachment's."""
        return call in self._calls

    def detach(self) -> None:
        """Restore the stages. Repeatable; graphs that are still alive stay right."""
        while self._calls:
            self._calls.pop().restore()
        self._runner.begin_passive()

    def _begin(self) -> None:
        """Begin a step, before the first of its calls."""
        if not self._calls:
            # Detached; but somebody wrapped the wrapper, and so still calls it.
            return
        schedule = self._schedule()
        self._update_plan(schedule)
        # Without it, its stages serve a schedule that was never attached: that one is learned.
        has_backward = schedule is None or schedule._has_backward
        if has_backward and torch.is_grad_enabled():
            self._runner.begin_step(self._plan)
        else:
            self._runner.begin_passive()

    def _update_plan(self, schedule: Any | None) -> None:
        """Plan what the schedule lists, once; or else what it was seen to do."""
        source = self._source if schedule is None else _order_source(schedule)
        if source != self._source:
            self._source = source
            self._plan = self._lower(read_order(schedule))
        elif self._runner.desynced:
            # It does not do what it lists. The next step is recorded, and followed from then on.
            self._plan = None
        elif self._runner.recorded is not None:
            self._plan = self._lower(self._runner.recorded)

    def _lower(self, order: ComputeOrder | None) -> tuple[LoweredStep, ...] | None:
        if order is None or find_order_problem(order):
            return None
        return plan_rank(order, attentions=self._attentions, deferred_weight_stages=self._deferred)


class _StageCall:
    """A method of a stage, on the instance, in place of the one of its class."""

    def __init__(self, stage: Any, name: str) -> None:
        self._stage = ref(stage)
        self._name = name
        self._own: Callable[..., Any] | None = vars(stage).get(name)
        setattr(stage, name, self)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        stage = self._stage()
        return getattr(type(stage), self._name)(stage, *args, **kwargs)

    def restore(self) -> None:
        """Take the wrapper off, unless somebody wrapped it in turn: then it only passes calls."""
        stage = self._stage()
        if stage is None or vars(stage).get(self._name) is not self:
            return
        if self._own is not None:
            setattr(stage, self._name, self._own)
        else:
            delattr(stage, self._name)


class _ComputeCall(_StageCall):
    """A compute method: its first argument is the microbatch, whatever the others are."""

    kind: ClassVar[Kind]
    microbatch: ClassVar[str] = "bwd_chunk_id"

    def __init__(self, stage: Any, name: str, runner: ScheduleRunner) -> None:
        self._index = stage.stage_index
        self._runner = runner
        super().__init__(stage, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = args[0] if args else kwargs[self.microbatch]
        action = Action(self._index, self._kind_of(args, kwargs), microbatch)
        with self._runner.compute(action):
            return self._original(*args, **kwargs)

    def _kind_of(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Kind:
        return self.kind


class _ForwardCall(_ComputeCall):
    kind = Kind.FORWARD
    microbatch = "fwd_chunk_id"


class _BackwardCall(_ComputeCall):
    def _kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        by_position = args[_FULL_BACKWARD] if len(args) > _FULL_BACKWARD else True
        full = kwargs.get("full_backward", by_position)
        return Kind.FULL_BACKWARD if full else Kind.BACKWARD_INPUT


class _WeightCall(_ComputeCall):
    kind = Kind.BACKWARD_WEIGHT


class _BeginCall(_StageCall):
    def __init__(self, stage: Any, name: str, begin: Callable[[], None]) -> None:
        self._begin = begin
        super().__init__(stage, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return self._original(*args, **kwargs)


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


def _stages(schedule: Any) -> Sequence[Any] | None:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    if isinstance(schedule, PipelineScheduleMulti):
        return schedule._stages
    return None


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


def _order_source(schedule: Any) -> object:
    """Return what :func:`read_order` reads, to compare: the same list is equal at no cost."""
    if isinstance(schedule, PipelineScheduleSingle):
        return schedule._n_microbatches
    actions = _listed_actions(schedule)
    return actions, len(actions)


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
