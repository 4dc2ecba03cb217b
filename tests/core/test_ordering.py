# SPDX-License-Identifier: Apache-2.0
"""For every copy: what must come before it does, and what must come after it does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapPolicy
from activation_swap.core import engine as engine_module
from activation_swap.core.pinned_pool import PinnedPool
from activation_swap.core.transfer import Copy, Fence
from tests.core.happens_before import COPIES, Recording, races, recording
from tests.core.recording_transfer import Operation, Record, RecordingTransfer, Span
from tests.models import (
    TINY,
    build,
    difference,
    forward,
    install,
    step,
    swapped,
    tokens,
    twins,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]

SMALL = SwapPolicy(min_bytes=1, slab_bytes=4096)


def one_step(model: Any) -> None:
    step(model, tokens(model))


def many_microbatches(model: Any) -> None:
    """Four forwards before the first backward, of different lengths, backward in odd order."""
    losses = [forward(model, tokens(model, length=n)).loss for n in (12, 3, 20, 7)]
    for index in (2, 0, 3, 1):
        losses[index].backward()


def retained(model: Any) -> None:
    loss = forward(model, tokens(model)).loss
    loss.backward(retain_graph=True)
    loss.backward()


def dropped_then_used(model: Any) -> None:
    """A graph is dropped with its copies in flight; the next one takes its memory over."""
    for seed in range(3):
        forward(model, tokens(model, seed=seed))
        one_step(model)


def only_the_last_layer(model: Any) -> None:
    loss = forward(model, tokens(model)).loss
    torch.autograd.grad(loss, list(model.model.layers[-1].parameters()), allow_unused=True)


def backward_in_the_middle(model: Any) -> None:
    """Layer 1's loss runs backward while layer 2's groups are still out."""
    output = forward(model, tokens(model), output_hidden_states=True)
    output.hidden_states[1].square().sum().backward(retain_graph=True)
    output.loss.backward()


def forward_behind_a_prefetch(model: Any) -> None:
    """A reload that nobody waits for yet is in flight when a new offload takes its host bytes."""
    first = forward(model, tokens(model)).loss
    torch.autograd.grad(
        first, list(model.model.layers[-1].parameters()), allow_unused=True, retain_graph=True
    )
    second = forward(model, tokens(model, seed=2)).loss
    second.backward()
    first.backward()


RUNS: dict[str, Callable[[Any], None]] = {
    run.__name__: run
    for run in (
        one_step,
        many_microbatches,
        retained,
        dropped_then_used,
        only_the_last_layer,
        backward_in_the_middle,
        forward_behind_a_prefetch,
    )
}


def watched(run: Callable[[Any], None], *, repeat: int = 2, **options: Any) -> Recording:
    """Run on a recorded model; several times, so that memory is taken over."""
    model = build(TINY, dtype=torch.bfloat16, attention="sdpa")
    tape = recording(SMALL, **options)
    with swapped(model, SMALL, links=tape.links), tape.watch():
        for _ in range(repeat):
            run(model)
    return tape


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_nothing_races(run: Callable[[Any], None], record_property: Any) -> None:
    """Sources complete, kept until copied, buffers reused behind their readers, uses after H2D."""
    tape = watched(run)
    record_property("copies", tape.count(Operation.OFFLOAD) + tape.count(Operation.RELOAD))
    record_property("kernels", tape.count(Operation.COMPUTE))
    assert tape.count(Operation.OFFLOAD) > 0
    assert tape.count(Operation.COMPUTE) > 100
    assert [str(race) for race in races(tape.log)] == []


def test_recording_changes_no_bit() -> None:
    plain, model = twins()
    ids = tokens(plain)
    tape = recording()
    with swapped(model, links=tape.links):
        assert difference(step(model, ids), step(plain, ids)) is None


def test_every_copy_says_what_it_waits_for() -> None:
    """The same as exact assertions on the log of one step."""
    tape = watched(one_step, repeat=2)
    copies = [record for record in tape.log if record.operation in COPIES]
    offloads = [record for record in copies if record.operation is Operation.OFFLOAD]
    reloads = [record for record in copies if record.operation is Operation.RELOAD]
    # Per step: three layers less the kept last one.
    assert len(offloads) == len(reloads) == 4
    assert all(record.source == "compute:MainThread" for record in copies)
    for reload in reloads:
        own = [record for record in offloads if set(reload.reads) <= set(record.writes)]
        # Behind its own D2H, the latest into these bytes.
        assert own
        assert own[-1].fence in reload.after or own[0].fence in reload.after
    for record in copies:
        waits = [r for r in tape.log if r.operation is Operation.WAIT and r.fence is record.fence]
        assert len(waits) == 1
        assert waits[0].stream == "compute:MainThread"


def test_every_copy_is_of_bytes_alone() -> None:
    """A kernel on a transfer stream, behind a copy, stops compute for longer than it runs."""
    moves: list[Any] = []

    class Notes(RecordingTransfer):
        def offload(self, moved: Any, *, stream: Any, after: Any) -> Fence:
            moves.extend(moved)
            return super().offload(moved, stream=stream, after=after)

        def reload(self, moved: Any, *, stream: Any, after: Any) -> Fence:
            moves.extend(moved)
            return super().reload(moved, stream=stream, after=after)

    watched(one_step, repeat=1, kind=Notes)
    whole = [(device, host[0]) for device, host in moves if len(host) == 1]
    assert whole
    for device, host in whole:
        assert (device.dtype, device.size(), device.stride()) == (
            host.dtype,
            host.size(),
            host.stride(),
        )
    for device, host in moves:
        assert {piece.dtype for piece in host} == {device.dtype}
        assert sum(piece.nbytes for piece in host) == device.nbytes


def test_device_memory_is_freed_behind_the_wait_alone() -> None:
    tape = watched(one_step, repeat=1)
    log = tape.log
    for number, record in enumerate(log):
        if record.operation is not Operation.OFFLOAD:
            continue
        wait = next(
            n
            for n, r in enumerate(log)
            if r.operation is Operation.WAIT and r.fence is record.fence
        )
        freed = [
            n
            for n, r in enumerate(log)
            if n > number and r.operation is Operation.FREE and r.writes[0] in record.reads
        ]
        assert freed
        assert min(freed) > wait > number


class ForgetsFences(RecordingTransfer):
    """Launches copies behind compute alone."""

    def offload(self, moves: Any, *, stream: Any, after: Any) -> Fence:  # noqa: ARG002
        return super().offload(moves, stream=stream, after=())

    def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:  # noqa: ARG002
        return super().reload(moves, stream=stream, after=())


class ForgetsCompute(RecordingTransfer):
    """Launches copies behind fences alone."""

    def offload(self, moves: Any, *, stream: Any, after: Any) -> Fence:  # noqa: ARG002
        return super().offload(moves, stream="nobody", after=after)


class ForgetsTargets(RecordingTransfer):
    """Lets reloads start before the former owner of the target's memory is done."""

    def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:  # noqa: ARG002
        return super().reload(moves, stream="nobody", after=after)


class WaitsOnItself(RecordingTransfer):
    """Takes the wait on the copy's stream: torchtitan's #2581."""

    def wait(self, stream: Any, fence: Fence) -> None:  # noqa: ARG002
        super().wait(fence.lane, fence)


@pytest.mark.parametrize("kind", [ForgetsFences, ForgetsCompute, ForgetsTargets, WaitsOnItself])
def test_the_proof_finds_a_broken_transfer(kind: Any) -> None:
    assert races(watched(forward_behind_a_prefetch, kind=kind).log)


def test_the_proof_finds_an_engine_that_frees_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Copy):
        """Lets go of the memory first: trl's and torchtune's defect."""

        def join(self) -> None:
            self._keepalive, keepalive = None, self._keepalive
            if keepalive is not None:
                keepalive.clear()

    monkeypatch.setattr(engine_module, "Copy", Impatient)
    assert races(watched(one_step).log)


def test_the_proof_finds_a_pool_that_forgets_the_last_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_back = PinnedPool.give_back
    monkeypatch.setattr(
        PinnedPool, "give_back", lambda self, pieces, _fences: give_back(self, pieces, ())
    )
    assert races(watched(forward_behind_a_prefetch).log)


def test_backward_in_another_thread_is_ordered() -> None:
    """The forward's stream owns the memory; the stream that computes follows it."""
    model = build(TINY, dtype=torch.bfloat16, attention="sdpa")
    tape = recording(SMALL)
    with swapped(model, SMALL, links=tape.links) as swap:
        with tape.watch():
            loss = forward(model, tokens(model)).loss

        def backward() -> None:
            with tape.watch():
                loss.backward()

        worker = threading.Thread(target=backward, name="worker")
        worker.start()
        worker.join()
        assert swap.stats().offloaded_bytes < swap.stats().saved_bytes, "some came back narrow"
    waited = {record.stream for record in tape.log if record.operation is Operation.WAIT}
    assert waited == {"compute:MainThread"}
    lent = {(r.stream, r.source) for r in tape.log if r.operation is Operation.LEND}
    assert lent == {("compute:worker", "compute:MainThread")}
    reloads = [record for record in tape.log if record.operation is Operation.RELOAD]
    assert {record.source for record in reloads} == {"compute:MainThread"}
    # Between kernels and copies of two streams, memory is shared here, which no accelerator does.
    frees = [str(race) for race in races(tape.log) if race.second.operation is Operation.FREE]
    assert frees == []


def test_dropped_graph_joins_its_copy() -> None:
    """No block returns to the allocator while a copy that nobody waits for may touch it."""
    model = build()
    tape = recording(SMALL)
    installation = install(model, SMALL, links=tape.links)
    loss = forward(model, tokens(model)).loss
    before = len(tape.log)
    del loss
    tail = tape.log[before:]
    installation.remove()
    open_copies = {
        record.fence for record in tape.log[:before] if record.operation is Operation.OFFLOAD
    } - {record.fence for record in tape.log[:before] if record.operation is Operation.WAIT}
    waited = {record.fence for record in tail if record.operation is Operation.WAIT}
    assert waited == open_copies


@pytest.mark.unit
@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([], 1),
        ([Record(Operation.WAIT, "compute", fence=Fence("d2h", 0, None))], 0),
        ([Record(Operation.WAIT, "other", fence=Fence("d2h", 0, None))], 1),
    ],
    ids=["no wait", "waits", "another stream waits"],
)
def test_races_by_hand(tail: list[Record], expected: int) -> None:
    block = (Span(0, 64),)
    log = [
        Record(Operation.COMPUTE, "compute", writes=block),
        Record(
            Operation.OFFLOAD,
            "d2h",
            reads=block,
            writes=(Span(100, 164),),
            source="compute",
            fence=Fence("d2h", 0, None),
        ),
        *tail,
        Record(Operation.FREE, "compute", writes=block),
    ]
    assert len(races(log)) == expected


BLOCK = (Span(0, 64),)
READ_BESIDE = Record(Operation.COMPUTE, "beside", reads=BLOCK)
LENT = Record(Operation.LEND, "beside", reads=BLOCK, source="compute")
OWNED = Record(Operation.OWN, "compute", writes=BLOCK)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ([OWNED, READ_BESIDE], 1),
        ([OWNED, LENT, READ_BESIDE], 0),
        ([READ_BESIDE, OWNED], 0),
        ([OWNED, Record(Operation.COMPUTE, "compute", reads=BLOCK)], 0),
    ],
    ids=["not lent", "lent", "before it was owned", "its own stream"],
)
def test_races_of_a_free_by_hand(log: list[Record], expected: int) -> None:
    free = Record(Operation.FREE, "compute", writes=BLOCK)
    assert len(races([*log, free])) == expected
