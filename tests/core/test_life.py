# SPDX-License-Identifier: Apache-2.0
"""From apply to remove: no grad no state, exceptions, copies of models, no trace afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap.core.hooks import AfterAttention, BeforeAttention, InertHook
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.models import build, difference, forward, install, step, swapped, tokens, twins

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]


def trace(model: Any) -> list[Any]:
    """Return everything that hooks leave on a module, and the names of its attributes."""
    return [
        (
            name,
            sorted(vars(module)),
            {key: len(value) for key, value in vars(module).items() if "hooks" in key and value},
        )
        for name, module in model.named_modules()
    ]


def at_base(swap: Any) -> bool:
    gc.collect()
    stats = swap.stats()
    return stats.live_groups == stats.resident_bytes == stats.host_bytes_in_use == 0


@pytest.fixture
def no_cycle_collector() -> Iterator[None]:
    """What dies in the test dies with its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_remove_leaves_no_trace() -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))
    before = trace(model)
    for _ in range(3):
        with swapped(model) as swap:
            assert trace(model) != before
            step(model, tokens(model))
        assert not swap.active
        assert trace(model) == before
        assert swap.stats().host_bytes_reserved == 0
        swap.remove()
    assert top_saved_tensor_hooks() is None
    assert difference(step(model, tokens(model)), expected) is None


@pytest.mark.usefixtures("no_cycle_collector")
@pytest.mark.parametrize("remove", [False, True])
def test_a_model_dies_with_its_last_reference(*, remove: bool) -> None:
    model = build()
    swap = install(model)
    step(model, tokens(model))
    if remove:
        swap.remove()
    alive = weakref.ref(model)
    del model
    assert alive() is None, "the handle does not keep it"
    swap.remove()
    alive = weakref.ref(swap)
    del swap
    assert alive() is None


def test_a_graph_outlives_remove_and_the_model() -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain)).gradients
    swap = install(model)
    loss = forward(model, tokens(model)).loss
    swap.remove()
    parameters = dict(model.named_parameters())
    del model, swap
    gc.collect()
    loss.backward()
    for name, gradient in expected.items():
        found = parameters[name].grad
        assert found is not None
        assert torch.equal(found, gradient)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_there_is_no_state(context: Any) -> None:
    plain, model = twins()
    with swapped(model) as swap, context():
        found = forward(model, tokens(model)).logits
        assert torch.equal(found, forward(plain, tokens(plain)).logits)
        stats = swap.stats()
    assert stats == type(stats)(kept_bytes={})


def test_eval_with_gradients_swaps_as_training_does() -> None:
    plain, model = twins(attention="sdpa")
    with swapped(model) as swap:
        step(model, tokens(model))
        trained = swap.stats().offloaded_bytes
        swap.reset_stats()
        assert (
            difference(step(model.eval(), tokens(model)), step(plain.eval(), tokens(plain))) is None
        )
        assert swap.stats().offloaded_bytes == trained > 0


PLACES = (
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.q_norm",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp",
    "model.layers.2.post_attention_layernorm",
    "model.norm",
    "lm_head",
)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_the_forward_leaves_nothing(place: str, *, after: bool) -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))

    def fail(*_: Any) -> None:
        message = "planned"
        raise ValueError(message)

    with swapped(model) as swap:
        module = model.get_submodule(place)
        register = module.register_forward_hook if after else module.register_forward_pre_hook
        for _ in range(3):
            handle = register(fail)
            with pytest.raises(ValueError, match="planned"):
                step(model, tokens(model))
            assert top_saved_tensor_hooks() is None
            assert at_base(swap)
            handle.remove()
            assert difference(step(model, tokens(model)), expected) is None
            assert at_base(swap)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301 - our own bytes
def test_a_copy_trains_without_swap_and_says_so_once(how: Any) -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))
    swap = install(model)
    twin = how(model)
    with pytest.warns(RuntimeWarning, match="part of a copy of a model under activation_swap"):
        found = step(twin, tokens(twin))
    assert difference(found, expected) is None
    assert difference(step(twin, tokens(twin)), expected) is None
    assert swap.stats().offloaded_bytes == 0
    again = install(twin)
    hooks = [
        hook
        for module in twin.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    assert not any(isinstance(hook, InertHook) for hook in hooks)
    assert sum(isinstance(hook, BeforeAttention | AfterAttention) for hook in hooks) == 6
    assert difference(step(twin, tokens(twin)), expected) is None
    assert again.stats().saved_bytes > 0
    assert difference(step(model, tokens(model)), expected) is None


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("again", [False, True])
def test_a_hook_of_the_attention_may_remove_the_swap(kind: str, *, again: bool) -> None:
    """Torch then calls ours once more, without the keywords."""
    plain, model = twins()
    ids = tokens(plain)
    swaps: list[Any] = []

    def remove(*_: Any) -> None:
        if len(swaps) == 1:
            swaps[0].remove()
            swaps.append(install(model) if again else None)

    getattr(model.model.layers[1].self_attn, kind)(remove)
    swaps.append(install(model))
    assert difference(step(plain, ids), step(model, ids)) is None
    assert len(swaps) == 2
    assert top_saved_tensor_hooks() is None
    assert difference(step(plain, ids), step(model, ids)) is None


def test_two_threads_train_one_model_s_forward() -> None:
    """Each thread has a chain of its own; graphs of both are right."""
    plain, model = twins()
    batches = [tokens(plain, length=4 + n, seed=n) for n in range(8)]
    weights = list(plain.parameters())
    expected = [torch.autograd.grad(forward(plain, ids).loss, weights) for ids in batches]
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    with swapped(model) as swap:

        def train(first: int) -> None:
            torch.set_num_threads(1)
            for index in range(first, 8, 2):
                loss = forward(model, batches[index]).loss
                found[index] = torch.autograd.grad(loss, list(model.parameters()))

        threads = [threading.Thread(target=train, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert swap.stats().saved_bytes > 0
        assert at_base(swap)
    for index, gradients in enumerate(expected):
        assert all(map(torch.equal, found[index], gradients))
