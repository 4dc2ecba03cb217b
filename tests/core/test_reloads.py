# SPDX-License-Identifier: Apache-2.0
"""From the wait for a reload to the tensor that backward gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activation_swap import SwapPolicy, TrainingSetup
from activation_swap._site import Site
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.install import InstalledSwap, install
from activation_swap.core.link import Links
from activation_swap.core.saved_storage import SavedStorage
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.core.swap_plan import SwapPlan
from activation_swap.core.transfer import Copy, Fence
from activation_swap.errors import RejectedError
from tests.core.chain import POLICY, Chain, equal, install_chain, run
from tests.faults.harness import at_base
from tests.models import gradients

pytestmark = pytest.mark.unit


def hidden() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_came_back_narrow_is_widened_however_often_that_fails(
    monkeypatch: pytest.MonkeyPatch, number: int, *, late: bool
) -> None:
    """Two upcasts in each attention: a failure in between leaves one narrow and one wide."""
    plain, chain = Chain(), Chain()
    for attention in (*plain.attentions, *chain.attentions):
        attention.inner = lambda value: (
            value.sigmoid().bfloat16().float().square() + value.tanh().bfloat16().float().square()
        )
    swap = install_chain(chain)
    widen, calls = SavedStorage.widen, []

    def failing(storage: SavedStorage) -> None:
        calls.append(storage)
        if late:
            widen(storage)
        if len(calls) == number:
            raise torch.OutOfMemoryError
        if not late:
            widen(storage)

    monkeypatch.setattr(SavedStorage, "widen", failing)
    loss = chain(hidden())
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    chain.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    assert len(calls) > number
    assert equal(gradients(chain) | {"loss": loss.detach()}, run(plain, hidden()))
    del loss
    calls.clear()
    assert at_base(swap)


def test_what_a_group_needs_comes_before_what_the_next_one_will_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reload ahead of time must not take the memory in which the group itself is widened."""
    chain = Chain(layers=4)
    log: list[str] = []
    for attention in chain.attentions:
        attention.inner = lambda value: value.sigmoid().bfloat16().float().square()

    class Logs(HostTransfer):
        def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
            log.append("reload")
            return super().reload(moves, stream=stream, after=after)

    widen = SavedStorage.widen

    def logged(storage: SavedStorage) -> None:
        log.append("widen")
        widen(storage)

    monkeypatch.setattr(SavedStorage, "widen", logged)
    install_chain(chain, links=Links(POLICY, make_transfer=Logs))
    run(chain, hidden())
    assert log == ["reload", "widen"] * 3


def test_a_wait_that_fails_is_tried_again() -> None:
    """Only then does a block go back to its stream's allocator."""
    block = torch.zeros(4)
    waited = []

    class Interrupted(HostTransfer):
        def wait(self, stream: None, fence: Fence) -> None:  # noqa: ARG002 - protocol
            waited.append(fence)
            if len(waited) == 1:
                raise KeyboardInterrupt

    fence, blocks = Fence("h2d", 0, None), [block]
    copy = Copy(Interrupted(torch.device("cpu")), None, fence, blocks)
    with pytest.raises(KeyboardInterrupt):
        copy.join()
    for _ in range(2):
        copy.join()
    assert waited == [fence] * 2


def test_an_early_reload_of_a_pipeline_that_fails_is_made_up_for() -> None:
    """Early is a hint there, too: when backward needs the group, others may have freed memory."""

    class Full(HostTransfer):
        full = True

        def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
            if self.full:
                self.full = False
                raise torch.OutOfMemoryError
            return super().reload(moves, stream=stream, after=after)

    plain, chain = Chain(), Chain()
    swap = pipelined(chain, Full)
    swap.groups.set_group((0, 0))
    loss = chain(hidden())
    swap.groups.set_group(None)
    for verb in ("launch_offload", "wait_offload", "launch_reload", "wait_reload"):
        getattr(swap.groups, verb)((0, 0))
    loss.backward()
    assert equal(gradients(chain) | {"loss": loss.detach()}, run(plain, hidden()))
    assert swap.stats().reload_misses == 1


@pytest.mark.parametrize("narrow", [False, True])
def test_what_comes_back_in_inference_mode_is_no_inference_tensor(*, narrow: bool) -> None:
    """A backward in that mode may be followed by one that saves what it unpacks."""
    found = []
    for swaps in (False, True):
        chain = Chain().to(torch.bfloat16 if narrow else torch.float32)
        if narrow:
            chain.attentions[0].inner = lambda value: value.float().sin().to(torch.bfloat16)
        if swaps:
            install_chain(chain, SwapPolicy(min_bytes=1, slab_bytes=4096))
        weights = list(chain.parameters())
        loss = chain(hidden().detach().to(weights[0].dtype))
        with torch.inference_mode():
            torch.autograd.grad(loss, weights, retain_graph=True)
        first = torch.autograd.grad(loss, weights, create_graph=True)
        norm = torch.stack([gradient.float().square().sum() for gradient in first]).sum()
        found.append(torch.autograd.grad(norm, weights))
    assert all(map(torch.equal, *found))


def test_passive_forwards_before_the_first_step_are_legal() -> None:
    """An evaluation with grad, say; only a training forward without any schedule is refused."""
    chain = Chain()
    swap = pipelined(chain, HostTransfer)
    with pytest.raises(RejectedError, match="AS510"):
        run(chain, hidden())
    runner = ScheduleRunner(swap.groups)
    runner.begin_passive()
    assert equal(run(chain, hidden()), run(Chain(), hidden()))
    assert swap.stats().offloaded_bytes == 0


def pipelined(chain: Chain, transfer: type[HostTransfer]) -> InstalledSwap:
    sites = tuple(
        Site(fqn=f"attentions.{index}", module=module, owners=(chain,), returns=2)
        for index, module in enumerate(chain.attentions)
    )
    plan = SwapPlan(sites=sites, policy=POLICY, setup=TrainingSetup(pp_size=2))
    return install(plan, links=Links(POLICY, make_transfer=transfer))
