# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt between any two lines of the swap, or of the attention that it watches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activation_swap.core import (
    attention_calls,
    engine,
    group,
    hooks,
    layer_chain,
    link,
    packed_tensor,
    pinned_pool,
    recorder,
    saved_storage,
    transfer,
)
from activation_swap.core import install as install_module
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.faults.harness import at_base, next_backward
from tests.faults.interrupter import Interrupter, Remover, interrupted_removals
from tests.models import VERY_TINY, build, difference, install, step, tokens, twins

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]

OURS = frozenset(
    str(module.__file__)
    for module in (
        attention_calls,
        engine,
        group,
        hooks,
        layer_chain,
        packed_tensor,
        recorder,
        saved_storage,
        transfer,
    )
)
POOL = frozenset({str(pinned_pool.__file__)})


def lines_of(files: frozenset[str]) -> int:
    """Return how many lines of these files a step runs."""
    model = build(VERY_TINY)
    install(model)
    with Interrupter(0, files) as trace:
        step(model, tokens(model))
    return trace.lines


def is_interrupted(model: Any, ids: torch.Tensor, *, number: int, files: frozenset[str]) -> bool:
    """Begin a step that ends at line ``number`` of those that it runs in ``files``."""
    try:
        with Interrupter(number, files):
            step(model, ids)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize(("files", "least"), [(OURS, 300), (POOL, 100)], ids=["swap", "pool"])
def test_interrupted_in_any_line_of_the_swap(
    files: frozenset[str], least: int, record_property: Any
) -> None:
    """The next step is right; nothing is left once it is over.

    But for bytes that were changing hands in the pool: they are nobody's until ``remove``.
    """
    plain, model = twins(VERY_TINY)
    ids = tokens(plain)
    expected = step(plain, ids)
    lines = lines_of(files)
    assert lines > least
    interrupted = 0
    for number in range(1, lines + 1, max(1, lines // 100)):
        swap = install(model)
        interrupted += is_interrupted(model, ids, number=number, files=files)
        model.zero_grad(set_to_none=True)
        for _ in range(2):
            assert difference(step(model, ids), expected) is None, f"line {number}"
        assert top_saved_tensor_hooks() is None
        next_backward()
        if files is OURS:
            assert at_base(swap), f"line {number}: {swap.stats()}"
        swap.remove()
        assert swap.stats().host_bytes_reserved == 0
        assert difference(step(model, ids), expected) is None
    record_property("interrupts", interrupted)
    assert interrupted >= 90


def test_evaluation_after_an_interrupt_in_any_line(record_property: Any) -> None:
    """It has no call of its own to end, takes nobody's hooks off, and training goes on."""
    plain, model = twins(VERY_TINY)
    ids = tokens(plain)
    expected = step(plain, ids)
    lines = lines_of(OURS)
    interrupted = 0
    for number in range(1, lines + 1, max(1, lines // 60)):
        swap = install(model)
        interrupted += is_interrupted(model, ids, number=number, files=OURS)
        hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with hooks, torch.no_grad():
            model(ids)
            top = top_saved_tensor_hooks()
            assert top is not None
            assert top[0] is _same, f"line {number}"
        with torch.no_grad():
            model(ids)
        model.zero_grad(set_to_none=True)
        assert difference(step(model, ids), expected) is None, f"line {number}"
        assert top_saved_tensor_hooks() is None
        next_backward()
        assert at_base(swap), f"line {number}: {swap.stats()}"
        swap.remove()
    record_property("interrupts", interrupted)
    assert interrupted > 40


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _RemoverInCalls(Remover):
    """Counts the lines in which torch calls some modules and their hooks."""

    modules: Any = ()

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        called = frame.f_locals.get("self") if frame.f_code.co_name in CALLS else None
        return super()._call(frame, event, arg) if called in self.modules else None


CALLS = ("_call_impl", "inner")


def test_removed_in_any_line_of_torch_s_call_of_an_attention(record_property: Any) -> None:
    """By a signal handler. Torch goes on with the hooks that it began with, taken off or not."""
    files = frozenset({str(torch.nn.modules.module.__file__)})
    plain, model = twins(VERY_TINY)
    ids = tokens(plain)
    expected = step(plain, ids)
    number = lines = 0
    while number <= lines:
        number += 1
        trace = _RemoverInCalls(number, files, install(model))
        trace.modules = [layer.self_attn for layer in model.model.layers]
        with trace:
            found = step(model, ids)
        lines = trace.lines
        trace.swap.remove()
        assert difference(found, expected) is None, f"line {number}"
        assert top_saved_tensor_hooks() is None, f"line {number}"
        assert difference(step(model, ids), expected) is None
    assert number > 30
    record_property("interrupts", number)


@pytest.mark.parametrize("again", [False, True], ids=["interrupt", "handler"])
def test_removal_that_is_interrupted_in_any_line_is_ended_by_another(*, again: bool) -> None:
    """Of `remove` itself, of what ends the calls, and of what frees the host memory."""
    files = OURS | POOL | {str(install_module.__file__), str(link.__file__)}
    plain, model = twins(VERY_TINY)
    ids = tokens(plain)
    expected = step(plain, ids)
    number = 0

    def begin() -> Any:
        swap = install(model)
        step(model, ids)
        return swap

    for number, swap in interrupted_removals(begin, files, again=again):
        assert swap.stats().host_bytes_reserved == 0, f"line {number}"
        assert not any(module._forward_pre_hooks for module in model.modules()), f"line {number}"
        assert difference(step(model, ids), expected) is None
    assert number > 20


def test_interrupted_in_any_line_of_the_attention(record_property: Any) -> None:
    """Also when the swap is removed instead of used again."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    files = frozenset({str(modeling_qwen3_moe.__file__)})
    plain, model = twins(VERY_TINY)
    ids = tokens(plain)
    expected = step(plain, ids)
    lines = lines_of(files)
    interrupted = 0
    for number in range(1, lines + 1, max(1, lines // 60)):
        swap = install(model)
        interrupted += is_interrupted(model, ids, number=number, files=files)
        if number % 2:
            swap.remove()
            assert top_saved_tensor_hooks() is None
        model.zero_grad(set_to_none=True)
        assert difference(step(model, ids), expected) is None
        next_backward()
        assert at_base(swap)
        swap.remove()
    record_property("interrupts", interrupted)
    assert interrupted > 40


def test_interrupted_by_a_signal() -> None:
    """A real one, while a backward runs in another thread than the handler's."""
    import signal

    plain, model = twins()
    ids = tokens(plain)
    expected = step(plain, ids)
    swap = install(model)
    model.model.layers[1].self_attn.q_norm.register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGINT)
    )
    # Another test's library may have put a handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(model, ids)
    finally:
        signal.signal(signal.SIGINT, before)
    model.model.layers[1].self_attn.q_norm._forward_pre_hooks.clear()
    assert difference(step(model, ids), expected) is None
    assert at_base(swap)
    assert torch.is_grad_enabled()
