# SPDX-License-Identifier: Apache-2.0
"""The verbs of one's own scheduler: which order is legal, and that a thread has its own group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from activation_swap import SwapPolicy, SwapStats, TrainingSetup, registry
from activation_swap._verbs import Keep
from activation_swap.errors import ActivationSwapError, Reason, RejectedError, SwapStateError
from tests.pipeline.tiny_pipeline import tiny_model

pytestmark = pytest.mark.level0

ORDER = ("set_group", "launch_offload", "wait_offload", "launch_reload", "wait_reload")
KEY = (0, 3)


@pytest.fixture
def model() -> Any:
    return tiny_model(2, torch.float32, seed=0)


@pytest.fixture
def swap(model: Any) -> Any:
    return registry.apply(
        "attention",
        model,
        setup=TrainingSetup(pp_size=2),
        policy=SwapPolicy(min_bytes=2048),
    )


def forward(model: Any, length: int = 64) -> torch.Tensor:
    tokens = torch.arange(length)[None] % 97
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@pytest.mark.parametrize("done", range(len(ORDER) + 1))
@pytest.mark.parametrize("verb", ORDER)
def test_only_the_next_verb_is_legal(swap: Any, done: int, verb: str) -> None:
    """After ``wait_offload`` the chunk may also be named anew: its backward needs no verb."""
    groups = swap.groups
    for earlier in ORDER[:done]:
        getattr(groups, earlier)(KEY)
    legal = {*ORDER[done : done + 1], *(("set_group",) if done != 1 else ())}
    if verb in legal:
        getattr(groups, verb)(KEY)
    else:
        with pytest.raises(SwapStateError) as caught:
            getattr(groups, verb)(KEY)
        assert caught.value.reason is Reason.GROUP_STATE
        groups.abort(KEY)
        groups.set_group(KEY)


@pytest.mark.parametrize("verb", [*ORDER, "abort"])
@pytest.mark.parametrize("key", [3, (3,), (0, 3, 1), (0, [3]), "ab", (0, 0.5), (0, -1)])
def test_what_is_no_key_is_refused(swap: Any, verb: str, key: Any) -> None:
    with pytest.raises(RejectedError) as caught:
        getattr(swap.groups, verb)(key)
    assert caught.value.reason is Reason.NOT_A_CHUNK
    assert caught.value.found.startswith(repr(key))


def test_what_to_keep_may_be_a_text_and_nothing_else(model: Any, swap: Any) -> None:
    swap.groups.set_group(KEY, keep="ALL")
    forward(model).backward()
    assert swap.stats().offloaded_bytes == 0
    with pytest.raises(RejectedError, match="AS512"):
        swap.groups.set_group(KEY, keep="junk")


def test_chunks_whose_keys_never_come_again_are_forgotten(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activation_swap.core.chunks._MANY", 4)
    swap = registry.apply(
        "attention", model, setup=TrainingSetup(pp_size=2), policy=SwapPolicy(min_bytes=1)
    )
    groups: Any = swap.groups
    graphs = []
    for microbatch in range(40):
        key = (0, microbatch)
        groups.set_group(key)
        loss = forward(model, length=8)
        groups.set_group(None)
        groups.launch_offload(key)
        groups.wait_offload(key)
        graphs.append(loss)
        if microbatch >= 2:
            graphs.pop(0).backward()
    assert len(groups._chunks) < 16
    for microbatch in (38, 39):
        # In flight: still known.
        groups.launch_reload((0, microbatch))


def test_a_chunk_that_stays_whole_needs_no_verb_after_its_forward(model: Any, swap: Any) -> None:
    for _ in range(2):
        swap.groups.set_group(KEY, keep=Keep.ALL)
        loss = forward(model)
        swap.groups.set_group(None)
        loss.backward()
    assert swap.stats().offloaded_bytes == 0
    assert swap.stats().live_groups == 0


def test_a_chunk_that_stays_whole_may_be_closed_without_a_warning(model: Any, swap: Any) -> None:
    """As a schedule does that leaves its plan: nothing was to move."""
    swap.groups.set_group(KEY, keep=Keep.ALL)
    loss = forward(model)
    swap.groups.set_group(None)
    swap.groups.launch_offload(KEY)
    loss.backward()


def test_the_tail_stays(model: Any, swap: Any) -> None:
    moved = {}
    for keep in (Keep.NOTHING, Keep.TAIL):
        swap.reset_stats()
        swap.groups.set_group(KEY, keep=keep)
        loss = forward(model)
        swap.groups.launch_offload(KEY)
        swap.groups.wait_offload(KEY)
        moved[keep] = swap.stats().offloaded_bytes
        loss.backward()
    assert moved[Keep.NOTHING] == 2 * moved[Keep.TAIL] > 0


def test_a_chunk_too_short_to_move_is_no_reason_to_warn(model: Any, swap: Any) -> None:
    """Warnings are errors here; and the first chunk moved."""
    for length, moves in ((64, True), (2, False)):
        swap.reset_stats()
        swap.groups.set_group(KEY)
        loss = forward(model, length)
        swap.groups.launch_offload(KEY)
        swap.groups.wait_offload(KEY)
        loss.backward()
        assert (swap.stats().offloaded_bytes > 0) is moves


def test_two_threads_record_into_their_own_groups(model: Any, swap: Any) -> None:
    """Lengths tell the chunks apart: each chunk's release gives up its own bytes."""
    barrier = Barrier(2)

    def run(key: tuple[int, int], length: int) -> torch.Tensor:
        swap.groups.set_group(key)
        barrier.wait(10)
        loss = forward(model, length)
        swap.groups.launch_offload(key)
        barrier.wait(10)
        return loss

    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(run, ((0, 0), (0, 1)), (256, 512)))
    resident = []
    for key in ((0, 0), (0, 1)):
        before = swap.stats().resident_bytes
        swap.groups.wait_offload(key)
        resident.append(before - swap.stats().resident_bytes)
    assert resident[1] == 2 * resident[0] > 0
    assert swap.stats().resident_bytes == 0
    for loss in losses:
        loss.backward()
    assert swap.stats().live_groups == 0


def test_aborted_groups_leave_live_graphs_right(model: Any, swap: Any) -> None:
    swap.groups.set_group(None)
    forward(model).backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    swap.groups.set_group(KEY)
    loss = forward(model)
    swap.groups.launch_offload(KEY)
    swap.groups.wait_offload(KEY)
    swap.groups.abort()
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    assert all(map(torch.equal, expected, gradients))
    assert swap.stats().reload_misses == 1


def test_a_swap_that_moves_nothing_has_verbs_that_do_nothing(model: Any, swap: Any) -> None:
    swap.remove()
    for inactive in (swap, registry.apply("none", model)):
        for verb in (*ORDER, *reversed(ORDER), "abort"):
            getattr(inactive.groups, verb)(KEY)
        inactive.groups.set_group(KEY, keep=Keep.TAIL)
        forward(model).backward()
        inactive.groups.set_group(None)
        assert inactive.stats() == SwapStats()


def test_verbs_without_a_pipeline_are_refused(model: Any) -> None:
    swap = registry.apply("attention", model)
    with pytest.raises(ActivationSwapError) as caught:
        _ = swap.groups
    assert caught.value.reason is Reason.WITHOUT_PIPELINE
