# SPDX-License-Identifier: Apache-2.0
"""Follows a schedule of ``torch.distributed.pipelining``, 2.11 to 2.14.

What a schedule will compute is read, never written. Wrapped on the instance, and restored on
detach: the three methods of a stage that every schedule calls for compute, and the one that it
calls when a step begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from activation_swap.core.schedule.actions import Action, Kind
from activation_swap.core.schedule.liveness import find_order_problem
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.core.schedule.torch_orders import order_source, read_order
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from activation_swap._verbs import GroupVerbs
    from activation_swap.core.hooked_site import HookedSite
    from activation_swap.core.schedule.actions import ComputeOrder, LoweredStep

__all__ = ["Attachment", "attach"]

_FULL_BACKWARD = 2
"""Position of ``full_backward`` in ``backward_one_chunk(chunk, loss, full_backward, ...)``."""


def attach(
    schedule: Any,
    verbs: GroupVerbs,
    *,
    sites: Sequence[HookedSite],
    recorded: Collection[int],
    replaces: Attachment | None = None,
) -> Attachment:
    """Let a schedule drive the chunks of its stages.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining``.
        verbs: What moves the chunks.
        sites: The attention modules of this rank.
        recorded: Indices of those that move; the plan counts no others.
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
    moving = [site.module() for index, site in enumerate(sites) if index in recorded]
    attentions = {
        index: sum(module in inside for module in moving) for index, inside in modules.items()
    }
    return Attachment(schedule, stages, verbs, attentions)


class Attachment:
    """The wrappers on the stages of one schedule.

    Args:
        schedule: The schedule to follow.
        stages: Its stages on this rank.
        verbs: What moves the chunks.
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
        # A stage that somebody calls before any step of the schedule is followed by nobody.
        self._runner.begin_passive()
        self._source: object = None
        self._plan: tuple[LoweredStep, ...] | None = None
        self._listed: tuple[LoweredStep, ...] | None = None
        self._learns = True
        self._calls: list[_StageCall] = []
        for stage in stages:
            self._calls += [
                # Every schedule clears its stages one after the other when a step begins, and
                # another one may have only some of them: any may be the first. To begin a step
                # that nothing was computed of changes nothing.
                _BeginCall(stage, "clear_runtime_states", self._begin),
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
        for call in tuple(self._calls):
            call.restore()
        self._calls.clear()
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
        source = self._source if schedule is None else order_source(schedule)
        if source != self._source:
            self._source = source
            self._plan = self._listed = self._lower(read_order(schedule))
            self._learns = True
        elif self._runner.desynced:
            # It does not do what it lists. The next step is recorded, and followed from then on.
            self._plan = None if self._learns else self._listed
        elif self._runner.ran_without_plan:
            self._plan = self._lower(self._runner.recorded)
            if self._plan is None:
                # Nothing that could be followed: what it lists is nearer to it than nothing.
                self._plan, self._learns = self._listed, False

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
        if stage is None:
            msg = f"the stage of this {self._name} is gone"
            raise ReferenceError(msg)
        return getattr(type(stage), self._name)(stage, *args, **kwargs)

    def restore(self) -> None:
        """Take the wrapper off, unless somebody wrapped it in turn: then it only passes calls."""
        stage = self._stage()
        if stage is None or vars(stage).get(self._name) is not self:
            return
        if self._own is not None:
            setattr(stage, self._name, self._own)
        else:
            # A signal handler may have done it meanwhile.
            vars(stage).pop(self._name, None)


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


def _stages(schedule: Any) -> Sequence[Any] | None:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    if isinstance(schedule, PipelineScheduleMulti):
        return schedule._stages
    return None
