# SPDX-License-Identifier: Apache-2.0
"""One rank's schedule as data, with a text form that parses back."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from activation_swap._verbs import GroupKey, Keep
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from activation_swap.errors import ActivationSwapError

__all__ = [
    "COMPUTE_KINDS",
    "Action",
    "ComputeOrder",
    "Kind",
    "LoweredStep",
    "Step",
    "compute_actions",
    "format_plan",
    "parse_plan",
]


class Kind(StrEnum):
    """What an action does. The compute kinds have the letters of ``torch``'s own schedules."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SET_GROUP = "SET_GROUP"
    OFFLOAD = "OFFLOAD"
    WAIT_OFFLOAD = "WAIT_OFFLOAD"
    RELOAD = "RELOAD"
    WAIT_RELOAD = "WAIT_RELOAD"


COMPUTE_KINDS = frozenset(
    {Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
)
AFTER_KINDS = frozenset({Kind.OFFLOAD, Kind.WAIT_OFFLOAD})
"""Swap actions that belong to the step before them; the others belong to the step after."""

_ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})(?::([A-Z]+))?")
_OVERLAP = "OVERLAP_F_B"
_KINDS: Mapping[str, Kind] = {kind.value: kind for kind in Kind}
_KEEPS: Mapping[str | None, Keep] = {None: Keep.NOTHING} | {keep.value: keep for keep in Keep}


class Action(NamedTuple):
    """One compute or swap action on one chunk.

    Attributes:
        stage: Index of the stage in the whole pipeline.
        kind: What is done.
        microbatch: Index of the microbatch.
        keep: For ``SET_GROUP``: what stays on the device.
    """

    stage: int
    kind: Kind
    microbatch: int
    keep: Keep = Keep.NOTHING

    def __str__(self) -> str:
        """Text such as ``1F0``, ``1OFFLOAD0`` or ``1SET_GROUP0:TAIL``."""
        suffix = "" if self.keep is Keep.NOTHING else f":{self.keep}"
        return f"{self.stage}{self.kind}{self.microbatch}{suffix}"

    @property
    def key(self) -> GroupKey:
        """The chunk that the action is about."""
        return GroupKey(self.stage, self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            RejectedError: AS501, when ``text`` is not an action.
        """
        match = _ACTION.fullmatch(text)
        if match is not None:
            stage, kind, microbatch, keep = match.groups()
            known = kind in _KINDS and keep in _KEEPS
            if known and (keep is None or kind == Kind.SET_GROUP):
                return cls(int(stage), _KINDS[kind], int(microbatch), _KEEPS[keep])
        raise _malformed(text)


class Step(NamedTuple):
    """One compute step of a rank: one action, or several that the schedule overlaps."""

    members: tuple[Action, ...]

    def __str__(self) -> str:
        """Text as ``torch`` prints it: ``1F0``, or ``(0F4;3B1)OVERLAP_F_B``."""
        if len(self.members) == 1:
            return str(self.members[0])
        return f"({';'.join(map(str, self.members))}){_OVERLAP}"

    @classmethod
    def parse(cls, text: str) -> Step:
        """Read the text form of a compute step.

        Raises:
            RejectedError: AS501, when a part of ``text`` is not an action.
        """
        inner = text.removeprefix("(").removesuffix(f"){_OVERLAP}")
        compound = len(inner) == len(text) - len(f"(){_OVERLAP}")
        parts = inner.split(";") if compound else [text]
        return cls(tuple(Action.parse(part.strip()) for part in parts))


ComputeOrder = tuple[Step, ...]
"""What one rank computes in one training step, without bubbles and communication."""


class LoweredStep(NamedTuple):
    """A compute step with the swap actions around it.

    Attributes:
        before: ``RELOAD``, ``WAIT_RELOAD`` and ``SET_GROUP``, in order.
        step: What is computed.
        after: ``OFFLOAD`` and ``WAIT_OFFLOAD``, in order.
    """

    before: tuple[Action, ...]
    step: Step
    after: tuple[Action, ...]

    def __str__(self) -> str:
        """All actions of the step, separated by blanks."""
        return " ".join(map(str, (*self.before, self.step, *self.after)))


def format_plan(plan: Iterable[LoweredStep]) -> str:
    """Write a lowered schedule as actions separated by blanks."""
    return " ".join(map(str, plan))


def parse_plan(text: str) -> tuple[LoweredStep, ...]:
    """Read what :func:`format_plan` wrote. A plain compute order is a plan without swap actions.

    Raises:
        RejectedError: AS501, when a part of ``text`` is not an action, or when a swap action has no
            compute step to belong to.
    """
    lowered: list[tuple[list[Action], Step, list[Action]]] = []
    before: list[Action] = []
    for word in text.split():
        step = Step.parse(word)
        first = step.members[0]
        if all(member.kind in COMPUTE_KINDS for member in step.members):
            lowered.append((before, step, []))
            before = []
        elif len(step.members) > 1:
            raise _malformed(word)
        elif first.kind not in AFTER_KINDS:
            before.append(first)
        elif lowered and not before:
            lowered[-1][2].append(first)
        else:
            raise _malformed(word)
    if before:
        raise _malformed(str(before[0]))
    return tuple(LoweredStep(tuple(pre), step, tuple(post)) for pre, step, post in lowered)


def compute_actions(order: Sequence[Step]) -> Iterator[tuple[int, Action]]:
    """Every compute action with the index of its step."""
    for index, step in enumerate(order):
        for member in step.members:
            yield index, member


def _malformed(text: str) -> ActivationSwapError:
    return Reason.SCHEDULE_TEXT.error(found=repr(text))
