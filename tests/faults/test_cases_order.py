# SPDX-License-Identifier: Apache-2.0
"""Field cases on ordering and on the order of graphs: C01, C03, C18, C20, C21, C22, C33."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapStats, TrainingSetup, registry
from activation_swap.errors import SwapStateError
from tests.faults.harness import (
    apply,
    at_base,
    batch,
    everything,
    model_for,
    poisoned,
    policy_for,
    slow_links,
)
from tests.models import (
    EVERYTHING,
    Step,
    build,
    difference,
    forward,
    gradients,
    install,
    step,
    swapped,
    tokens,
    twins,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("exact")


def test_c01_memory_freed_or_reused_too_early(device: torch.device, record_property: Any) -> None:
    """Twenty steps of one shape with stalled copies, all free memory NaN."""
    plain, model = model_for(device), model_for(device)
    policy = policy_for(device)
    batches = [batch(plain, seed=seed) for seed in range(20)]
    expected = [step(plain, ids) for ids in batches]
    links = slow_links(device, policy)
    with swapped(model, policy, links=links) as swap, poisoned(model):
        found = [step(model, ids) for ids in batches]
        assert swap.stats().offloaded_bytes > 0
        record_property("storages", swap.stats().offloaded_storages)
    assert difference(found, expected) is None
    for one in found:
        assert all(bool(g.isfinite().all()) for g in one.gradients.values())


def test_c03_lengths_differ_between_microbatches(device: torch.device) -> None:
    lengths = (512, 128, 2048, 130)
    plain, model = model_for(device), model_for(device)
    policy = policy_for(device)
    batches = [tokens(plain, length=n if device.type != "cpu" else n // 8) for n in lengths]
    expected = step(plain, *batches)
    with swapped(model, policy, links=slow_links(device, policy)):
        assert difference(step(model, *batches), expected) is None


def test_c03_several_microbatches_are_out_at_once(device: torch.device) -> None:
    """As in 1F1B: the data of each forward is kept apart, whatever its length."""
    plain, model = model_for(device), model_for(device)
    policy = policy_for(device)
    batches = [tokens(plain, length=n) for n in (64, 16, 256, 18)]

    def one_forward_one_backward(model: Any) -> Step:
        model.zero_grad(set_to_none=True)
        losses = [forward(model, ids).loss for ids in batches[:2]]
        for index in range(4):
            losses[index].backward()
            if index + 2 < 4:
                losses.append(forward(model, batches[index + 2]).loss)
        return Step(torch.stack(losses).detach(), gradients(model))

    expected = one_forward_one_backward(plain)
    with swapped(model, everything(device), links=slow_links(device, policy)) as swap:
        assert difference(one_forward_one_backward(model), expected) is None
        assert at_base(swap)


def test_c18_losses_in_any_order(device: torch.device) -> None:
    """Hidden states of two layers enter the loss with weights; two batches, the first used last."""
    plain, model = model_for(device), model_for(device)

    def run(model: Any) -> Step:
        model.zero_grad(set_to_none=True)
        outputs = [forward(model, batch(model, seed=s), output_hidden_states=True) for s in (1, 2)]
        losses = [
            0.3 * output.hidden_states[1].float().square().mean()
            + 0.7 * output.hidden_states[3].float().mean()
            for output in outputs
        ]
        (losses[1] * 2 + losses[0]).backward(retain_graph=True)
        losses[0].backward()
        return Step(torch.stack(losses).detach(), gradients(model))

    expected = run(plain)
    with swapped(model, everything(device), links=slow_links(device, everything(device))):
        assert difference(run(model), expected) is None


@pytest.mark.level0
def test_c20_some_saved_tensors_are_never_read() -> None:
    """A dropped graph, a backward of the last layer alone, a normal step; twenty times."""
    plain, model = twins()

    def last_layer(model: Any) -> Step:
        parameters = dict(model.model.layers[-1].named_parameters())
        loss = forward(model, tokens(model)).loss
        # An expert that no token was sent to has no gradient.
        found: list[Any] = list(
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        )
        named = zip(parameters, found, strict=True)
        return Step(loss.detach(), {name: g for name, g in named if g is not None})

    unused = tokens(plain, seed=7)
    expected = [step(plain, tokens(plain)), last_layer(plain)]
    swap = apply(model)
    reserved = None
    for _ in range(20):
        thrown_away = forward(model, unused)
        found = [step(model, tokens(model))]
        swap.reset_stats()
        found.append(last_layer(model))
        # The last layer stayed; the documented look-ahead is one layer.
        one_layer = swap.stats().offloaded_bytes // 2
        assert swap.stats().reloaded_bytes == one_layer
        assert difference(found, expected) is None
        del thrown_away
        assert at_base(swap)
        reserved = reserved or swap.stats().host_bytes_reserved
        assert swap.stats().host_bytes_reserved == reserved


@pytest.mark.level0
def test_c21_second_order_gradients() -> None:
    plain, model = twins(attention="eager")

    def run(model: Any) -> Step:
        model.zero_grad(set_to_none=True)
        loss = forward(model, tokens(model)).loss
        weight = model.model.layers[1].self_attn.q_proj.weight
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        first.square().sum().backward()
        return Step(loss.detach(), gradients(model) | {"first": first.detach()})

    expected = run(plain)
    swap = apply(model)
    for _ in range(20):
        assert difference(run(model), expected) is None
        model.zero_grad(set_to_none=True)
        assert at_base(swap)


@pytest.mark.level0
def test_c22_two_models_in_two_threads() -> None:
    pairs = [twins(seed=seed) for seed in (1, 2)]
    batches = [tokens(pairs[0][0], length=4, seed=seed) for seed in range(50)]
    expected = [[step(plain, ids) for ids in batches] for plain, _ in pairs]
    swaps = [apply(model) for _, model in pairs]
    assert swaps[0] is not swaps[1]
    found: dict[int, list[Step]] = {}

    def train(index: int) -> None:
        # Whether the kernels must be deterministic is one flag of the process; threads are ours.
        torch.set_num_threads(1)
        found[index] = [step(pairs[index][1], ids) for ids in batches]

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert difference(found[index], expected[index]) is None
        assert swaps[index].stats().saved_bytes > 0
        assert at_base(swaps[index])


def test_c22_forward_in_a_worker_backward_in_the_main_thread(device: torch.device) -> None:
    plain, model = model_for(device), model_for(device)
    expected = step(plain, batch(plain))
    losses: list[torch.Tensor] = []
    with swapped(model, everything(device), links=slow_links(device, everything(device))) as swap:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            losses.clear()
            worker = threading.Thread(
                target=lambda: losses.append(forward(model, batch(model)).loss)
            )
            worker.start()
            worker.join()
            losses[0].backward()
            found = Step(losses[0].detach().reshape(1), gradients(model))
            assert difference(found, expected) is None
        losses.clear()
        assert at_base(swap)


VERBS = ("launch_offload", "wait_offload", "launch_reload", "wait_reload")


@pytest.mark.level0
@pytest.mark.parametrize(
    ("verbs", "refused"),
    [
        ((), "launch_reload"),
        ((), "wait_reload"),
        ((), "wait_offload"),
        (("launch_offload",), "launch_offload"),
        (("launch_offload",), "launch_reload"),
        (("launch_offload", "wait_offload"), "wait_reload"),
        (("launch_offload", "wait_offload", "launch_reload"), "launch_reload"),
        (VERBS, "wait_reload"),
    ],
)
def test_c33_illegal_steps_name_the_chunk_and_its_state(
    verbs: tuple[str, ...], refused: str
) -> None:
    """Each raises, and the graph that is out stays right."""
    plain, model = twins()
    expected = step(plain, tokens(plain))
    setup = TrainingSetup(pp_size=2)
    swap: Any = registry.apply("attention", model, setup=setup, policy=EVERYTHING)
    groups = swap.groups
    groups.set_group((0, 3))
    loss = forward(model, tokens(model)).loss
    groups.set_group(None)
    for verb in verbs:
        getattr(groups, verb)((0, 3))
    with pytest.raises(SwapStateError, match=f"stage 0, microbatch 3(.|\n)*{refused} of a chunk"):
        getattr(groups, refused)((0, 3))
    loss.backward()
    assert difference(Step(loss.detach().reshape(1), gradients(model)), expected) is None


@pytest.mark.level0
@pytest.mark.parametrize("verb", VERBS)
def test_c33_unknown_group(verb: str) -> None:
    setup = TrainingSetup(pp_size=2)
    swap: Any = registry.apply("attention", build(), setup=setup, policy=EVERYTHING)
    with pytest.raises(SwapStateError, match="unknown"):
        getattr(swap.groups, verb)((0, 0))


@pytest.mark.level0
def test_c33_a_step_may_end_with_a_group_still_out() -> None:
    """Harmless: the tensors belong to the graph, and the key is free after abort."""
    model = build()
    setup = TrainingSetup(pp_size=2)
    swap: Any = registry.apply("attention", model, setup=setup, policy=EVERYTHING)
    swap.groups.set_group((0, 0))
    loss = forward(model, tokens(model)).loss
    with pytest.raises(SwapStateError, match="RECORDING"):
        swap.groups.set_group((0, 0))
    swap.groups.abort((0, 0))
    swap.groups.set_group((0, 0))
    swap.groups.set_group(None)
    del loss
    assert at_base(swap)


def _state(stats: SwapStats) -> tuple[int, int]:
    return stats.live_groups, stats.resident_bytes


@pytest.mark.level0
def test_c33_engine_steps_out_of_order_do_nothing() -> None:
    """The layer chain's own verbs only act on a group that is where they begin."""
    model = build()
    swap = install(model)
    engine: Any = swap._engine
    loss = forward(model, tokens(model)).loss
    groups = sorted(engine._groups, key=lambda group: group.index)
    calls: tuple[Callable[[Any], None], ...] = (engine.wait_reload, engine.release)
    before = swap.stats()
    for call in calls:
        call(groups[0])
        call(groups[2])
    assert swap.stats() == before
    engine.launch_reload(groups[0])
    engine.launch_reload(groups[0])
    assert swap.stats().reloaded_bytes == before.offloaded_bytes // 2
    with pytest.raises(SwapStateError, match="a step to OFFLOADING in state RELOADING"):
        groups[0].move_to(type(groups[0].state).OFFLOADING)
    loss.backward()
    assert _state(swap.stats()) == (3, swap.stats().resident_bytes)
    del groups, loss
    assert at_base(swap)
