# SPDX-License-Identifier: Apache-2.0
"""What holds for the plan of any legal compute order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activation_swap._verbs import GroupKey, Keep
from activation_swap.core.schedule.actions import ComputeOrder, Kind, format_plan, parse_plan
from activation_swap.core.schedule.decision import decide, move_all
from activation_swap.core.schedule.liveness import ChunkLife, find_chunks
from activation_swap.core.schedule.lowering import lower, plan_rank
from activation_swap.core.schedule.simulation import MIN_GAP, in_flight, residency
from activation_swap.core.schedule.validation import validate
from tests.schedule.legal_orders import attention_counts, legal_orders

pytestmark = pytest.mark.unit

COMPUTE = {Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}

deferred = st.sets(st.integers(0, 5))


def weighed(values: list[int], flight: list[int], weight: int) -> int:
    return max(now + weight * flying for now, flying in zip(values, flight, strict=True))


@given(legal_orders(), attention_counts(), deferred)
def test_every_plan_is_valid_and_keeps_the_order(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int]
) -> None:
    plan = plan_rank(order, attentions=attentions, deferred_weight_stages=dw)
    validate(plan, deferred_weight_stages=dw)
    assert tuple(lowered.step for lowered in plan) == order
    assert parse_plan(format_plan(plan)) == plan


@given(legal_orders(), attention_counts(), deferred)
def test_moving_everything_is_valid_too(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int]
) -> None:
    chunks = find_chunks(order, deferred_weight_stages=dw)
    validate(
        lower(order, chunks, move_all(chunks, attentions=attentions)), deferred_weight_stages=dw
    )


@given(legal_orders(), attention_counts(), deferred)
def test_a_chunk_moves_beside_compute(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int]
) -> None:
    """The I of the first stage runs nothing: no copy could hide under it."""
    chunks = find_chunks(order, deferred_weight_stages=dw)
    plan = lower(order, chunks, move_all(chunks, attentions=attentions))
    spans = {Kind.WAIT_OFFLOAD: Kind.OFFLOAD, Kind.WAIT_RELOAD: Kind.RELOAD}
    begun: dict[tuple[Kind, GroupKey], int] = {}
    worked = 0
    for lowered in plan:
        for action in (*lowered.before, *lowered.step.members, *lowered.after):
            if action.kind in spans.values():
                begun[action.kind, action.key] = worked
            elif action.kind in spans:
                beside = worked - begun[spans[action.kind], action.key]
                whole = any(one.key == action.key and one.gap >= MIN_GAP for one in chunks)
                assert beside > 0 or not whole
            elif not (action.kind is Kind.BACKWARD_INPUT and action.stage == 0 and 0 not in dw):
                worked += action.kind in COMPUTE
    assert worked > 0


@given(legal_orders(), attention_counts(), deferred, st.sampled_from([0, 1, 3, 1000]))
@settings(max_examples=300)
def test_the_peak_never_rises_and_traffic_pays(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int], other: int
) -> None:
    """``other`` is what a chunk holds besides attention, per attention, on the device."""
    chunks = find_chunks(order, deferred_weight_stages=dw)
    steps = len(order)
    flight = in_flight(chunks, weights=attentions, steps=steps)
    everything = move_all(chunks, attentions=attentions)
    moved = residency(chunks, everything, attentions=attentions, steps=steps)
    keeps = decide(chunks, attentions=attentions, steps=steps)
    planned = residency(chunks, keeps, attentions=attentions, steps=steps)

    assert all(low <= mid <= high for low, mid, high in zip(moved, planned, flight, strict=True))
    assert weighed(planned, flight, other) == weighed(moved, flight, other)
    if weighed(moved, flight, other) == weighed(flight, flight, other):
        assert set(keeps.values()) == {Keep.ALL}


@given(legal_orders(), attention_counts(), deferred)
def test_a_chunk_stays_only_if_moving_it_would_not_help(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int]
) -> None:
    """No moved chunk could be kept in addition without raising some peak."""
    chunks = find_chunks(order, deferred_weight_stages=dw)
    steps = len(order)
    keeps = decide(chunks, attentions=attentions, steps=steps)
    flight = in_flight(chunks, weights=attentions, steps=steps)
    planned = residency(chunks, keeps, attentions=attentions, steps=steps)
    moved = residency(
        chunks, move_all(chunks, attentions=attentions), attentions=attentions, steps=steps
    )
    ceiling = [max(m for m, f in zip(moved, flight, strict=True) if f >= level) for level in flight]
    assert all(now <= high for now, high in zip(planned, ceiling, strict=True))
    for chunk in chunks:
        if keeps[chunk.key] is not Keep.ALL:
            more = residency(
                chunks, {**keeps, chunk.key: Keep.ALL}, attentions=attentions, steps=steps
            )
            assert any(now > high for now, high in zip(more, ceiling, strict=True))


@given(legal_orders(), attention_counts(), deferred)
def test_the_simulation_counts_what_the_actions_do(
    order: ComputeOrder, attentions: dict[int, int], dw: set[int]
) -> None:
    """Replay the lowered actions on a set of resident groups and compare step by step."""
    chunks = find_chunks(order, deferred_weight_stages=dw)
    keeps = decide(chunks, attentions=attentions, steps=len(order))
    simulated = residency(chunks, keeps, attentions=attentions, steps=len(order))
    plan = lower(order, chunks, keeps)
    resident: dict[GroupKey, int] = {}
    by_key = {chunk.key: chunk for chunk in chunks}
    for index, lowered in enumerate(plan):
        for action in lowered.before:
            if action.kind is Kind.RELOAD:
                resident[action.key] = min(attentions[action.stage], 1)
        for member in lowered.step.members:
            chunk = by_key[member.key]
            count = attentions[member.stage]
            resident[member.key] = _computing(
                chunk, keeps[member.key], index, count, resident.get(member.key, 0)
            )
        assert sum(resident.values()) == simulated[index]
        for member in lowered.step.members:
            chunk = by_key[member.key]
            if index == chunk.last_use:
                resident[member.key] = 0
            elif index == chunk.forward and keeps[member.key] is not Keep.ALL:
                resident[member.key] = min(attentions[member.stage], 1)
        for action in lowered.after:
            if action.kind is Kind.WAIT_OFFLOAD and keeps[action.key] is Keep.NOTHING:
                resident[action.key] = 0


def _computing(chunk: ChunkLife, keep: Keep, index: int, count: int, now: int) -> int:
    if index == chunk.forward:
        return count if keep is Keep.ALL else min(count, 2)
    if index < chunk.first_use or index > chunk.last_use:
        return now  # an I that runs nothing, or a W that a dw_builder owns
    if keep is Keep.ALL or chunk.last_use > chunk.first_use:
        return count
    return min(count, 2)
