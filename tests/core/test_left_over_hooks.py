# SPDX-License-Identifier: Apache-2.0
"""Saved-tensor hooks that no end of an attention took off: the thread gets rid of them anyway."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap.core.torch_private import top_saved_tensor_hooks
from activation_swap.errors import RejectedError
from tests.core.chain import Chain, equal, install_chain, run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("exact")]


def hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 8, generator=generator, requires_grad=True)


def interrupt(chain: Chain) -> None:
    """Press Ctrl-C inside of an attention: Python then runs no hook at its end."""

    def raises(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    chain.attentions[1].inner = raises
    with pytest.raises(KeyboardInterrupt):
        chain(hidden())
    assert top_saved_tensor_hooks() is not None


def test_an_interrupt_in_one_model_leaves_another_right() -> None:
    one, other = Chain(), Chain()
    swap, other_swap = install_chain(one), install_chain(other)
    interrupt(one)
    assert equal(run(other, hidden()), run(Chain(), hidden()))
    assert other_swap.stats().reloaded_bytes > 0
    assert top_saved_tensor_hooks() is None
    assert swap.stats().live_groups == 0


def test_a_new_model_is_swapped_after_an_interrupt_in_one_that_is_gone() -> None:
    from activation_swap import SwapPolicy, registry
    from tests.models import VERY_TINY, build

    chain = Chain()
    install_chain(chain)
    interrupt(chain)
    del chain
    registry.apply("attention", build(VERY_TINY), policy=SwapPolicy(min_bytes=1)).remove()
    assert top_saved_tensor_hooks() is None


def test_an_attention_of_many_storages_is_not_taken_for_one_that_was_left() -> None:
    def many(value: torch.Tensor) -> torch.Tensor:
        for _ in range(600):
            value = value.sin()
        return value

    plain, chain = Chain(), Chain()
    for one in (plain, chain):
        one.attentions[1].inner = many
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert swap.stats().offloaded_storages > 600


@pytest.mark.parametrize("gone", [False, True])
def test_a_model_without_swap_is_not_recorded_for_good(*, gone: bool) -> None:
    """It trains in the interrupted thread; nobody applies, removes, or calls the attention."""
    chain = Chain()
    swap = install_chain(chain)
    interrupt(chain)
    if gone:
        del chain, swap
    other = torch.nn.Linear(8, 8)
    saved: list[Any] = []
    for _ in range(400):
        value = torch.ones(2, 8)
        saved.append(weakref.ref(value))
        other(value).sum().backward()
        del value
    assert top_saved_tensor_hooks() is None
    assert not any(known() for known in saved)


def test_hooks_of_others_inside_of_an_interrupted_attention_stay() -> None:
    """Whoever entered them leaves them; what is under them is mended after that."""
    one, other = Chain(), Chain()
    install_chain(one)
    install_chain(other)
    interrupt(one)
    with (
        torch.autograd.graph.saved_tensors_hooks(torch.detach, torch.detach),
        pytest.raises(RejectedError, match="AS605"),
    ):
        other(hidden())
    assert equal(run(other, hidden()), run(Chain(), hidden()))
    assert top_saved_tensor_hooks() is None


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_remove_while_another_thread_is_inside_of_an_attention() -> None:
    """That thread's call has no hook any more that ends it."""
    chain = Chain()
    swap = install_chain(chain)
    inside, removed = threading.Event(), threading.Event()

    def waits(mixed: torch.Tensor) -> torch.Tensor:
        inside.set()
        removed.wait(timeout=30)
        return mixed

    chain.attentions[1].inner = waits
    found: dict[str, torch.Tensor] = {}
    left: list[object] = []

    def train() -> None:
        found.update(run(chain, hidden()))
        left.append(top_saved_tensor_hooks())

    thread = in_thread(train)
    assert inside.wait(timeout=30)
    swap.remove()
    removed.set()
    thread.join(timeout=30)
    assert equal(found, run(Chain(), hidden()))
    assert left == [None]
    assert swap.stats().live_groups == 0
    assert swap.stats().host_bytes_reserved == 0


def test_remove_inside_of_hooks_inside_of_an_attention() -> None:
    """Hooks of others are in the way then: ours go with the next save."""
    chain = Chain()
    swap = install_chain(chain)

    def removes(mixed: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, torch.detach):
            swap.remove()
        return mixed

    chain.attentions[1].inner = removes
    assert equal(run(chain, hidden()), run(Chain(), hidden()))
    assert top_saved_tensor_hooks() is None


@pytest.mark.parametrize("hooked", [False, True], ids=["alone", "in-other-hooks"])
def test_an_evaluation_after_an_interrupt_takes_nobodys_hooks_off(*, hooked: bool) -> None:
    """Without grad a call has no recorder: the one that is left is none of its own."""
    chain = Chain()
    expected, evaluated = run(Chain(), hidden()), Chain()(hidden()).detach()
    swap = install_chain(chain)
    plain = chain.attentions[1].inner
    interrupt(chain)
    chain.attentions[1].inner = plain
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    for _ in range(2):
        with torch.no_grad():
            if not hooked:
                assert torch.equal(chain(hidden()), evaluated)
                continue
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                assert torch.equal(chain(hidden()), evaluated)
                with torch.enable_grad():
                    hidden().sin()
    assert len(seen) == (2 if hooked else 0)
    assert equal(run(chain, hidden()), expected)
    assert top_saved_tensor_hooks() is None
    assert swap.stats().live_groups == 0


def test_an_evaluation_inside_of_an_attention_ends_no_call() -> None:
    """Of another attention, or of the same one again."""
    plain, chain = Chain(), Chain()
    for one in (plain, chain):
        first, second, _ = one.attentions
        again = iter([True, False] * 9)

        def inner(
            value: torch.Tensor, modules: Any = (first, second), again: Any = again
        ) -> torch.Tensor:
            with torch.no_grad():
                found = value * modules[1](value)[0]
                return found + modules[0](value)[0] if next(again) else found

        first.inner = inner
    swap = install_chain(chain)
    assert equal(run(chain, hidden()), run(plain, hidden()))
    assert swap.stats().offloaded_storages > 0
    assert top_saved_tensor_hooks() is None


def test_hooks_that_others_take_off_after_the_attention() -> None:
    """Put on by a pre-hook and taken off by a hook that were registered after those of the swap."""
    chain = Chain()
    swap = install_chain(chain)
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    others = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def put_on(*_: Any) -> None:
        others.__enter__()

    def take_off(*_: Any) -> None:
        others.__exit__()

    chain.attentions[1].register_forward_pre_hook(put_on)
    chain.attentions[1].register_forward_hook(take_off)
    for _ in range(3):
        assert equal(run(chain, hidden()), run(Chain(), hidden()))
        assert top_saved_tensor_hooks() is None
    assert seen
    assert swap.stats().live_groups == 0


def test_a_refusal_in_other_hooks_is_the_only_one() -> None:
    """An attention that calls itself with other hooks on: its next calls are right."""
    chain = Chain()
    swap = install_chain(chain)
    attention = chain.attentions[1]
    plain = attention.inner

    def inner(value: torch.Tensor) -> torch.Tensor:
        attention.inner = plain
        with torch.autograd.graph.save_on_cpu():
            return attention(value)[0]

    attention.inner = inner
    with pytest.raises(RejectedError, match="AS607"):
        chain(hidden())
    for _ in range(2):
        assert equal(run(chain, hidden()), run(Chain(), hidden()))
    assert top_saved_tensor_hooks() is None
    assert swap.stats().live_groups == 0


def test_an_interrupt_that_an_attention_catches_ends_no_other_call() -> None:
    chain = Chain()
    swap = install_chain(chain)
    _, second, last = chain.attentions
    plain = second.inner

    def raises(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    def inner(value: torch.Tensor) -> torch.Tensor:
        second.inner = raises
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            second(value)
        second.inner = plain
        return value

    last.inner = inner
    chain(hidden())
    assert top_saved_tensor_hooks() is None
    assert equal(run(chain, hidden()), run(Chain(), hidden()))
    assert swap.stats().offloaded_storages > 0
