# SPDX-License-Identifier: Apache-2.0
"""Lowering: from what a rank computes to when its chunks move. Pure; no step is reordered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from activation_swap._verbs import Keep
from activation_swap.core.schedule.actions import Action, Kind, LoweredStep
from activation_swap.core.schedule.arguments import check_attentions
from activation_swap.core.schedule.decision import decide
from activation_swap.core.schedule.liveness import find_chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from activation_swap._verbs import GroupKey
    from activation_swap.core.schedule.actions import Step
    from activation_swap.core.schedule.liveness import ChunkLife

__all__ = ["lower", "plan_rank"]

_SLOT_ORDER = (
    Kind.RELOAD,
    Kind.WAIT_RELOAD,
    Kind.SET_GROUP,
    Kind.OFFLOAD,
    Kind.WAIT_OFFLOAD,
)


def lower(
    order: Sequence[Step], chunks: Sequence[ChunkLife], keeps: Mapping[GroupKey, Keep]
) -> tuple[LoweredStep, ...]:
    """Put the swap actions around the compute steps.

    A chunk that moves whole leaves under the next step after its forward that computes anything,
    and comes back under the last such step before its first use. A chunk that keeps its tail needs
    no reload: by the time the tail is used, the attention before it is on its way.

    Args:
        order: What one rank computes.
        chunks: The life of every chunk in ``order``.
        keeps: What stays on the device, for every chunk.

    Returns:
        The steps of ``order`` with their swap actions.
    """
    before: list[list[Action]] = [[] for _ in order]
    after: list[list[Action]] = [[] for _ in order]
    for chunk in chunks:
        key, keep = chunk.key, keeps[chunk.key]
        before[chunk.forward].append(Action(key.stage, Kind.SET_GROUP, key.microbatch, keep))
        if keep is Keep.ALL:
            continue
        after[chunk.forward].append(_action(Kind.OFFLOAD, key))
        after[chunk.leaves].append(_action(Kind.WAIT_OFFLOAD, key))
        if keep is Keep.NOTHING:
            before[chunk.returns].append(_action(Kind.RELOAD, key))
            before[chunk.first_use].append(_action(Kind.WAIT_RELOAD, key))
    return tuple(
        LoweredStep(tuple(sorted(pre, key=_rank)), step, tuple(sorted(post, key=_rank)))
        for pre, step, post in zip(before, order, after, strict=True)
    )


def plan_rank(
    order: Sequence[Step],
    *,
    attentions: Mapping[int, int],
    deferred_weight_stages: Collection[int] = (),
) -> tuple[LoweredStep, ...]:
    """Decide what moves and lower the order of one rank.

    Args:
        order: What one rank computes in a training step.
        attentions: Number of attentions that move, by stage: all, but for
            ``SwapPolicy.fraction``.
        deferred_weight_stages: Stages with a ``dw_builder``.

    Returns:
        The steps of ``order`` with their swap actions, for :class:`ScheduleRunner`.

    Raises:
        RejectedError: AS502, when the order is not one of a training step; AS514, when
            ``attentions`` leaves one of its stages out.
    """
    check_attentions(order, attentions)
    chunks = find_chunks(order, deferred_weight_stages=deferred_weight_stages)
    keeps = decide(chunks, attentions=attentions, steps=len(order))
    return lower(order, chunks, keeps)


def _rank(action: Action) -> int:
    """Launches before waits, so that a copy never queues behind a wait of another chunk."""
    return _SLOT_ORDER.index(action.kind)


def _action(kind: Kind, key: GroupKey) -> Action:
    return Action(key.stage, kind, key.microbatch)
