# SPDX-License-Identifier: Apache-2.0
"""Execute a lowered schedule around the compute calls of one rank."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from enum import Enum, auto
from threading import RLock
from typing import TYPE_CHECKING

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Kind, Step
from activation_swap.core.schedule.arguments import check_compute, check_plan
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from activation_swap._verbs import GroupKey, GroupVerbs
    from activation_swap.core.schedule.actions import Action, ComputeOrder, LoweredStep

__all__ = ["ScheduleRunner"]

logger = logging.getLogger(__name__)

_LAST_KINDS = frozenset({Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT})


class _Mode(Enum):
    NOT_BEGUN = auto()
    """Neither a step nor an evaluation was begun: to pass calls by would silently move nothing."""
    PASSIVE = auto()
    """Evaluation: no call is followed and no chunk is named."""
    PLANNED = auto()
    """Every call so far was the one that the plan expects."""
    ON_DEMAND = auto()
    """No plan, or a call that it does not have: offload at once, reload when unpacked."""


class ScheduleRunner:
    """Runs the verbs of one rank's plan while somebody else runs its compute.

    A step is :meth:`begin_step`, then :meth:`compute` around each call of the stage; an evaluation
    is :meth:`begin_passive` and the same. A call that
    the plan does not expect ends the plan for this step: gradients do not depend on it, only the
    time that reloads take. The runner never calls compute and never waits for it.

    Calls may come from several threads, since some schedules overlap a forward with the backward
    of another chunk. Actions on a chunk of an overlapped step run on the thread that computes the
    chunk; the others run with whichever member enters first, or leaves last.

    Args:
        verbs: What moves the chunks: ``Swap.groups``.
    """

    def __init__(self, verbs: GroupVerbs) -> None:
        self._verbs = verbs
        # Reentrant: a signal handler may remove the swap between two lines of a verb.
        self._lock = RLock()
        self._mode = _Mode.NOT_BEGUN
        self._warned = False
        self._following = False
        self._reset(())

    @property
    def desynced(self) -> bool:
        """Whether this step left its plan, other than by failing."""
        return bool(self._plan) and self._mode is _Mode.ON_DEMAND and not self._failed

    @property
    def recorded(self) -> ComputeOrder | None:
        """The calls of this step, if it had no plan and every chunk of it is through."""
        finished = self._mode is _Mode.ON_DEMAND and not self._in_flight
        if self._plan or self._failed or not self._calls or not finished:
            return None
        return tuple(Step((action,)) for action in self._calls)

    @property
    def ran_without_plan(self) -> bool:
        """Whether calls of this step were recorded, and none of them raised."""
        return bool(self._calls) and not self._plan and not self._failed

    def begin_step(self, plan: Iterable[LoweredStep] | None) -> None:
        """Start a training step. What a failed step left behind is forgotten first.

        Args:
            plan: The lowered schedule of this rank, or ``None`` when its order is not known.

        Raises:
            RejectedError: It is no lowered schedule.
        """
        plan = None if plan is None else tuple(plan)
        check_plan(plan or ())
        with self._lock:
            # Of a step that failed, or was interrupted anywhere.
            self._verbs.abort()
            self._mode = _Mode.ON_DEMAND if plan is None else _Mode.PLANNED
            self._reset(plan or ())

    def begin_passive(self) -> None:
        """Start a step without backward: nothing moves until the next :meth:`begin_step`."""
        with self._lock:
            self._mode = _Mode.PASSIVE
            if self._following:
                # Detached by a signal handler between two lines of a verb, which ends as it began.
                return
            self._verbs.abort()
            # Forwards outside of any chunk are legal from here on, also before the first step.
            self._verbs.set_group(None)
            self._reset(())

    @contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        """Surround one compute call. A forward without grad is passed by: nothing is saved.

        Args:
            action: What the call computes.

        Raises:
            SwapStateError: No step was begun.
            RejectedError: ``action`` is no compute action.
        """
        import torch  # noqa: PLC0415 - to plan needs none

        check_compute(action)
        forward = action.kind == Kind.FORWARD
        if self._mode is _Mode.NOT_BEGUN:
            raise Reason.STEP_NOT_BEGUN.error(found=f"{action} before any step")
        if self._mode is _Mode.PASSIVE or (forward and not torch.is_grad_enabled()):
            yield
            return
        try:
            # Inside of the try: an interrupt may come between any two lines.
            self._follow(self._enter, action)
            yield
        except BaseException:
            with self._lock:
                self._fail()
            raise
        finally:
            if forward:
                self._verbs.set_group(None)
        self._follow(self._exit, action)

    def _follow(self, moment: Callable[[Action], None], action: Action) -> None:
        with self._lock:
            try:
                self._following = True
                moment(action)
            finally:
                self._following = False

    def _reset(self, plan: Sequence[LoweredStep]) -> None:
        self._plan = plan
        self._place = {
            member: index for index, lowered in enumerate(plan) for member in lowered.step.members
        }
        self._cursor = 0
        self._entered: set[Action] = set()
        self._running: set[Action] = set()
        self._calls: list[Action] = []
        self._failed = False
        self._in_flight: set[GroupKey] = set()
        self._open: set[GroupKey] = set()
        self._offloading: dict[GroupKey, None] = {}
        self._reloading: set[GroupKey] = set()

    def _fail(self) -> None:
        self._verbs.abort()
        if self._mode is not _Mode.PASSIVE:
            self._mode = _Mode.ON_DEMAND
        self._failed = True
        self._open.clear()
        self._offloading.clear()
        self._reloading.clear()

    def _enter(self, action: Action) -> None:
        if self._mode is _Mode.PLANNED and not self._expected(action):
            self._desync(action)
        if self._mode is _Mode.PLANNED:
            lowered = self._plan[self._cursor]
            first = not self._entered
            others = {member.key for member in lowered.step.members if member != action}
            for item in lowered.before:
                if item.key == action.key or (first and item.key not in others):
                    self._run(item)
            self._entered.add(action)
        else:
            self._enter_on_demand(action)
        self._running.add(action)
        if action.kind == Kind.FORWARD:
            self._in_flight.add(action.key)

    def _exit(self, action: Action) -> None:
        self._running.discard(action)
        if action.kind in _LAST_KINDS:
            self._in_flight.discard(action.key)
        if self._mode is not _Mode.PLANNED:
            self._exit_on_demand(action)
            return
        lowered = self._plan[self._cursor]
        keys = {member.key for member in lowered.step.members}
        last = len(self._entered) == len(lowered.step.members) and not self._running
        for item in lowered.after:
            if item.key == action.key or (last and item.key not in keys):
                self._run(item)
        if last:
            self._cursor += 1
            self._entered.clear()

    def _expected(self, action: Action) -> bool:
        return self._place.get(action) == self._cursor and action not in self._entered

    def _desync(self, action: Action) -> None:
        self._mode = _Mode.ON_DEMAND
        expected = "the end of the step"
        if self._cursor < len(self._plan):
            expected = str(self._plan[self._cursor].step)
        level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
        logger.log(
            level,
            "the pipeline ran %s where its schedule has %s; this step goes on without prefetch",
            action,
            expected,
        )

    def _enter_on_demand(self, action: Action) -> None:
        self._calls.append(action)
        if action.kind == Kind.FORWARD:
            self._set_group(action.key, Keep.NOTHING)
            return
        if action.key in self._offloading:
            self._wait_offload(action.key)
        if action.key in self._reloading:
            self._reloading.discard(action.key)
            self._verbs.wait_reload(action.key)

    def _exit_on_demand(self, action: Action) -> None:
        waiting = list(self._offloading)
        # A failure in another thread may have aborted this forward's chunk.
        if action.kind == Kind.FORWARD and action.key in self._open:
            self._launch_offload(action.key)
        for key in waiting:
            self._wait_offload(key)

    def _set_group(self, key: GroupKey, keep: Keep) -> None:
        # A chunk that is computed again is another one: what was launched of the last is done for.
        self._offloading.pop(key, None)
        self._reloading.discard(key)
        self._open.add(key)
        self._verbs.set_group(key, keep=keep)

    def _launch_offload(self, key: GroupKey) -> None:
        self._open.discard(key)
        self._offloading[key] = None
        self._verbs.launch_offload(key)

    def _wait_offload(self, key: GroupKey) -> None:
        if key not in self._offloading:
            # It was computed again since.
            return
        del self._offloading[key]
        self._verbs.wait_offload(key)

    def _run(self, action: Action) -> None:
        key, verbs = action.key, self._verbs
        match action.kind:
            case Kind.SET_GROUP:
                self._set_group(key, action.keep)
            case Kind.OFFLOAD:
                self._launch_offload(key)
            case Kind.WAIT_OFFLOAD:
                self._wait_offload(key)
            case Kind.RELOAD:
                self._reloading.add(key)
                verbs.launch_reload(key)
            case Kind.WAIT_RELOAD:
                self._reloading.discard(key)
                verbs.wait_reload(key)
