# SPDX-License-Identifier: Apache-2.0
"""What no model does every day: the engine stays right, and its account stays true."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.host_transfer import HostTransfer
from activation_swap.core.link import Links
from activation_swap.core.pinned_pool import PinnedPool
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.core.chain import POLICY, Chain, equal, install_chain, run
from tests.models import gradients

if TYPE_CHECKING:
    from activation_swap.core.install import InstalledSwap
    from activation_swap.core.transfer import Fence

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("exact")]


def hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 8, generator=generator, requires_grad=True)


def test_host_memory_is_not_on_the_default_device() -> None:
    expected, swapped = run(Chain(), hidden()), Chain()
    swap = install_chain(swapped)
    inputs = hidden()
    with torch.device("meta"):
        found = run(swapped, inputs)
    assert equal(found, expected)
    assert swap.stats().reloaded_bytes > 0


def test_a_device_may_come_while_the_links_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's first forward on it may come at any moment."""
    links = Links(POLICY)
    links.of(torch.device("cpu"))

    def one_more(_: PinnedPool) -> int:
        links.of(torch.device("cpu", len(links._links)))
        return 1

    for name in ("reserved_bytes", "bytes_in_use"):
        monkeypatch.setattr(PinnedPool, name, property(one_more))
    monkeypatch.setattr(PinnedPool, "close", one_more)
    assert links.reserved_bytes == 1
    assert links.bytes_in_use == 2
    links.close()
    assert len(links._links) == 8


def at_base(swap: InstalledSwap) -> bool:
    """Whether nothing of any graph is left."""
    gc.collect()
    stats = swap.stats()
    return stats.live_groups == stats.resident_bytes == stats.host_bytes_in_use == 0


class Failing(HostTransfer):
    """Raises at some calls, before or after it copied."""

    def __init__(self, device: torch.device, verb: str, *numbers: int, late: bool) -> None:
        super().__init__(device)
        self.verb, self.numbers, self.late, self.calls = verb, numbers, late, 0

    def offload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
        return self._run("offload", moves, stream, after)

    def reload(self, moves: Any, *, stream: Any, after: Any) -> Fence:
        return self._run("reload", moves, stream, after)

    def _run(self, verb: str, moves: Any, stream: Any, after: Any) -> Fence:
        fails = False
        if verb == self.verb:
            self.calls += 1
            fails = self.calls in self.numbers
        if fails and not self.late:
            raise torch.OutOfMemoryError(verb)
        fence = getattr(super(), verb)(moves, stream=stream, after=after)
        if fails:
            raise torch.OutOfMemoryError(verb)
        return fence


def links(transfer: HostTransfer) -> Links:
    return Links(POLICY, make_transfer=lambda _: transfer, system_headroom=lambda: None)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_offload_leaves_nothing_behind(number: int, *, late: bool) -> None:
    """As when the device is out of memory: the caller catches it and tries a smaller batch."""
    plain, chain = Chain(), Chain()
    transfer = Failing(torch.device("cpu"), "offload", number, late=late)
    swap = install_chain(chain, links=links(transfer))
    with pytest.raises(torch.OutOfMemoryError):
        run(chain, hidden())
    assert top_saved_tensor_hooks() is None
    assert at_base(swap)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert at_base(swap)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_prefetch_is_made_up_for(number: int, *, late: bool) -> None:
    """It was only early: what needs the group may find the memory that others have freed since."""
    plain, chain = Chain(), Chain()
    transfer = Failing(torch.device("cpu"), "reload", number, late=late)
    swap = install_chain(chain, links=links(transfer))
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert swap.stats().reload_misses == 1
    assert transfer.calls == 3
    assert at_base(swap)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_failed_reload_can_be_tried_again(first: int, *, late: bool) -> None:
    """The prefetch fails, and so does the reload in its place."""
    plain, chain = Chain(), Chain()
    transfer = Failing(torch.device("cpu"), "reload", first, first + 1, late=late)
    swap = install_chain(chain, links=links(transfer))
    loss = chain(hidden())
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    chain.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    found = gradients(chain) | {"loss": loss.detach()}
    assert equal(found, run(plain, hidden()))
    del loss
    assert at_base(swap)


def test_a_graph_that_dies_while_it_is_counted_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd's threads and the garbage collector drop graphs at any moment."""
    chain = Chain()
    swap = install_chain(chain)
    graphs = [chain(hidden()) for _ in range(2)]
    engine = swap._engine
    expected = swap.stats().resident_bytes

    class Dropping(type(engine._groups)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for group in super().__iter__():
                yield group
                del group
                graphs.clear()

    monkeypatch.setattr(engine, "_groups", Dropping(engine._groups))
    assert swap.stats().resident_bytes <= expected
    monkeypatch.undo()
    chain(hidden())
    assert engine._counters.resident_bytes >= 0
    assert swap.stats().resident_bytes == 0


def test_backward_inside_of_attention() -> None:
    """An attention that differentiates through itself unpacks before its recording is over."""
    plain, chain = Chain(), Chain()

    def differentiate(mixed: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(mixed.sin().sum(), mixed, retain_graph=True)
        (through,) = torch.autograd.grad(mixed.sum(), chain_input[0], retain_graph=True)
        return mixed * slope.detach() + through.detach()

    chain_input: list[torch.Tensor] = []
    for model in (plain, chain):
        for attention in model.attentions:
            attention.inner = differentiate
            attention.register_forward_pre_hook(
                lambda _, args: chain_input.__setitem__(slice(None), [args[0]])
            )
    expected = run(plain, hidden())
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), expected)
    assert swap.stats().saved_bytes > 0
    chain_input.clear()
    assert at_base(swap)


def test_an_attention_that_saves_nothing_does_not_break_the_chain() -> None:
    """The group before it is still released, and still prefetched."""
    plain, chain = Chain(layers=5), Chain(layers=5)
    for model in (plain, chain):
        for index in (1, 3):
            model.attentions[index].forward = lambda h: (h.detach(), None)
    swap = install_chain(chain)
    loss = chain(hidden())
    # The last stays, and nothing else does.
    assert swap.stats().resident_bytes == swap.stats().kept_bytes[KeepReason.LAST]
    loss.backward()
    assert swap.stats().reload_misses == 0
    assert equal(gradients(chain) | {"loss": loss.detach()}, run(plain, hidden()))


@pytest.mark.parametrize("layer", [0, 1])
def test_what_changed_before_its_launch_is_counted_once(layer: int) -> None:
    chain = Chain()
    saved: list[torch.Tensor] = []

    def change(mixed: torch.Tensor) -> torch.Tensor:
        saved.append(mixed.sin())
        result = mixed * saved[0]
        with torch.no_grad():
            saved[0].mul_(1)
        return result

    chain.attentions[layer].inner = change
    swap = install_chain(chain)
    loss = chain(hidden())
    stats = swap.stats()
    assert stats.kept_bytes.get(KeepReason.CHANGED, 0) == saved[0].nbytes
    with pytest.raises(RuntimeError, match=rf"AS603.*\n.*attentions\.{layer}"):
        loss.backward()
    del loss
    saved.clear()
    assert at_base(swap)


def test_a_change_that_backward_does_not_need_is_no_error() -> None:
    """As in plain autograd: only a node that runs looks at its saves."""
    plain, chain = Chain(), Chain()
    for model in (plain, chain):

        def unused(mixed: torch.Tensor) -> torch.Tensor:
            other = mixed.sin()
            other.exp().mul_(2)
            return mixed

        model.attentions[1].inner = unused
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert at_base(swap)


def test_remove_after_an_interrupt_takes_the_saved_tensor_hooks_off() -> None:
    """Python runs no hook for a KeyboardInterrupt, so that the recording is still open."""
    chain = Chain()

    def interrupt(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    chain.attentions[1].inner = interrupt
    swap = install_chain(chain)
    with pytest.raises(KeyboardInterrupt):
        chain(hidden())
    swap.remove()
    assert top_saved_tensor_hooks() is None
    assert at_base(swap)


def test_a_step_after_an_interrupt_is_right() -> None:
    plain, chain = Chain(), Chain()
    inner = chain.attentions[1].inner

    def interrupt(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    swap = install_chain(chain)
    for _ in range(3):
        chain.attentions[1].inner = interrupt
        with pytest.raises(KeyboardInterrupt):
            chain(hidden())
        chain.attentions[1].inner = inner
        assert equal(run(chain, hidden()), run(plain, hidden()))
    assert top_saved_tensor_hooks() is None
    assert at_base(swap)


@pytest.mark.filterwarnings("ignore:.*moved nothing:RuntimeWarning")
def test_an_attention_called_by_another_is_right() -> None:
    plain, chain = Chain(), Chain()
    for model in (plain, chain):
        other = [model.attentions[2]]
        model.attentions[0].inner = lambda mixed, other=other: other[0](mixed.tanh())[0]
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert at_base(swap)


def test_shared_attention_module() -> None:
    """One module at several places is called several times per forward."""
    plain, chain = Chain(), Chain()
    for model in (plain, chain):
        model.forward = lambda h, m=model: sum(  # type: ignore[method-assign,misc]
            m.attentions[0](m.attentions[0](h)[0])[0].sum() for _ in range(2)
        )
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert at_base(swap)


def test_anomaly_mode() -> None:
    plain, chain = Chain(), Chain()
    swap = install_chain(chain)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        torch.autograd.detect_anomaly(),
    ):
        found = run(chain, hidden())
    assert equal(found, run(plain, hidden()))
    assert at_base(swap)


def test_policy_without_eligible_tensors_warns_once() -> None:
    chain = Chain()
    swap = install_chain(chain, SwapPolicy())
    with pytest.warns(RuntimeWarning, match="moved nothing in a training forward.*small: "):
        run(chain, hidden())
    run(chain, hidden())
    assert at_base(swap)
