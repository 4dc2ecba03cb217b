# SPDX-License-Identifier: Apache-2.0
"""Real streams: every copy stalled, everything that is free overwritten with NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import Swap, SwapPolicy
from activation_swap.core import engine as engine_module
from activation_swap.core.transfer import Copy
from tests.faults.harness import (
    Stalled,
    at_base,
    batch,
    model_for,
    poisoned,
    queued_ahead,
    slow_links,
)
from tests.models import (
    EVERYTHING,
    Step,
    build,
    difference,
    forward,
    gradients,
    step,
    swapped,
    tokens,
)

if TYPE_CHECKING:
    from activation_swap.core.transfer import Fence

pytestmark = [pytest.mark.level1, pytest.mark.usefixtures("exact")]

STEPS = 200
HALF_A_SECOND = 1_000_000_000
"""In cycles of the device: about the time in which a slow host queues a step."""


def trajectory(model: Any, *, steps: int, lengths: tuple[int, ...]) -> list[Step]:
    """Train without waiting for the device between steps; the weights change."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for number in range(steps):
        ids = tokens(model, length=lengths[number % len(lengths)], seed=number)
        found.append(step(model, ids))
        optimizer.step()
    return found


@pytest.mark.parametrize("lengths", [(64,), (64, 17, 96, 33)], ids=["one-length", "lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_hundred_steps_have_the_same_bits(
    accelerator: torch.device,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    record_property: Any,
) -> None:
    """A tiny model on a fast host: the queue runs far ahead, and copies come late."""
    plain, model = (build(attention="sdpa", dtype=dtype, device=accelerator) for _ in range(2))
    expected = trajectory(plain, steps=STEPS, lengths=lengths)
    links = slow_links(accelerator, EVERYTHING, lambda device: Stalled(device, 300_000))
    ahead = queued_ahead(model, HALF_A_SECOND // 10)
    with swapped(model, EVERYTHING, links=links) as swap, poisoned(model), ahead:
        found = trajectory(model, steps=STEPS, lengths=lengths)
        assert at_base(swap)
        record_property("storages", swap.stats().offloaded_storages)
        assert swap.stats().offloaded_bytes == swap.stats().reloaded_bytes > 0
    assert difference(found, expected) is None
    assert all(bool(one.loss.isfinite().all()) for one in found)


def test_microbatches_and_prefetches_cross(accelerator: torch.device) -> None:
    """Reloads that nobody has waited for, and offloads into the bytes that they read."""
    plain, model = model_for(accelerator), model_for(accelerator)

    def run(model: Any) -> list[Step]:
        found = []
        for seed in range(6):
            model.zero_grad(set_to_none=True)
            first = forward(model, batch(model, length=512, seed=seed)).loss
            last = list(model.model.layers[-1].self_attn.parameters())
            torch.autograd.grad(first, last, retain_graph=True)
            second = forward(model, batch(model, length=640, seed=seed)).loss
            second.backward()
            first.backward()
            found.append(Step(torch.stack([first, second]).detach(), gradients(model)))
        return found

    expected = run(plain)
    with swapped(model, SwapPolicy(min_bytes=1), links=slow_links(accelerator, EVERYTHING)) as swap:
        with poisoned(model):
            assert difference(run(model), expected) is None
        assert at_base(swap)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad:UserWarning")
def test_side_stream_and_changing_streams(accelerator: torch.device) -> None:
    """Forward on a stream of the user's; the stream of the moment is asked for at each call."""
    plain, model = model_for(accelerator), model_for(accelerator)
    expected = [step(plain, batch(plain, length=512, seed=s)) for s in range(4)]
    streams = [torch.Stream(device=accelerator) for _ in range(2)]
    links = slow_links(accelerator, SwapPolicy(min_bytes=1))
    with swapped(model, SwapPolicy(min_bytes=1), links=links), poisoned(model):
        found = []
        for seed in range(4):
            torch.accelerator.synchronize(accelerator)
            with streams[seed % 2]:
                found.append(step(model, batch(model, length=512, seed=seed)))
        torch.accelerator.synchronize(accelerator)
    assert difference(found, expected) is None


def test_waits_of_stalled_copies_are_measured(accelerator: torch.device) -> None:
    """Each copy starts a millisecond late: compute waits, and less would hide."""
    model = model_for(accelerator)
    policy = SwapPolicy(min_bytes=1)
    ids = batch(model, length=512)
    links = slow_links(accelerator, policy)
    # A host that falls behind would hide the copies behind its own pauses.
    with swapped(model, policy, links=links) as swap, queued_ahead(model, HALF_A_SECOND):
        step(model, ids)
        with Swap(swap).measure_overlap() as overlap:
            step(model, ids)
        assert swap.overlaps == []
        torch.accelerator.synchronize(accelerator)
    # Seven groups move, each way.
    assert overlap.waits == 14
    assert overlap.waited_ms > 2.0
    assert overlap.fraction < 1.0


@pytest.mark.parametrize("name", ["o_proj", "q_proj"], ids=["first in backward", "later"])
def test_an_operation_of_an_attention_on_a_stream_of_its_own(
    accelerator: torch.device, name: str
) -> None:
    """Its backward runs there, too: it waits for the reload, and its reads hold the memory."""
    plain, model = model_for(accelerator), model_for(accelerator)
    side = torch.Stream(device=accelerator)
    for one in (plain, model):
        for layer in one.model.layers:
            projection = getattr(layer.self_attn, name)
            project = projection.forward

            def beside(value: torch.Tensor, project: Any = project) -> torch.Tensor:
                main = torch.accelerator.current_stream(accelerator)
                side.wait_stream(main)
                value.record_stream(side)
                with side:
                    result = project(value)
                main.wait_stream(side)
                result.record_stream(main)
                return result

            projection.forward = beside
    lent = []

    class Lends(Stalled):
        def lend(self, tensor: torch.Tensor, *, owner: Any, reader: Any) -> None:
            lent.append(reader)
            super().lend(tensor, owner=owner, reader=reader)

    expected = [step(plain, batch(plain, length=512, seed=s)) for s in range(4)]
    policy = SwapPolicy(min_bytes=1)
    links = slow_links(accelerator, policy, Lends)
    with swapped(model, policy, links=links) as swap, poisoned(model):
        found = [step(model, batch(model, length=512, seed=seed)) for seed in range(4)]
        assert at_base(swap)
    assert set(lent) == {side}
    assert difference(found, expected) is None


def test_dropped_graphs_give_their_memory_back_in_order(accelerator: torch.device) -> None:
    """Forwards whose graphs are thrown away with copies in flight, between real steps."""
    plain, model = model_for(accelerator), model_for(accelerator)
    expected = [step(plain, batch(plain, length=512, seed=s)) for s in range(5)]
    links = slow_links(accelerator, SwapPolicy(min_bytes=1))
    with swapped(model, SwapPolicy(min_bytes=1), links=links) as swap, poisoned(model):
        found = []
        for seed in range(5):
            forward(model, batch(model, length=512, seed=seed + 9))
            found.append(step(model, batch(model, length=512, seed=seed)))
        assert at_base(swap)
    assert difference(found, expected) is None


class NeverWaits(Stalled):
    """Leaves compute unordered: torchtune's defect."""

    def wait(self, stream: Any, fence: Fence) -> None:
        """Do nothing."""


class WaitsOnItself(Stalled):
    """Takes the wait on the copy's own stream: torchtitan's #2581."""

    def wait(self, stream: Any, fence: Fence) -> None:  # noqa: ARG002 - the defect
        with self._h2d_stream:
            super().wait(torch.accelerator.current_stream(self.device), fence)


class Impatient(Copy):
    """Lets go of the memory before it orders the stream: trl's defect."""

    def join(self) -> None:
        self._keepalive = None


@pytest.mark.parametrize("defect", ["never waits", "waits on itself", "frees too early"])
def test_the_stress_finds_what_it_is_for(
    accelerator: torch.device, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """Known defects of other engines, put into this one, change the gradients."""
    # Dense: garbage must not be taken for the number of an expert, which would end the process.
    dense = {"mlp_only_layers": list(range(8))}
    plain, model = model_for(accelerator, **dense), model_for(accelerator, **dense)
    batches = [batch(plain, length=512, seed=seed) for seed in range(4)]
    expected = [step(plain, ids) for ids in batches]
    kinds = {"never waits": NeverWaits, "waits on itself": WaitsOnItself}
    if defect == "frees too early":
        monkeypatch.setattr(engine_module, "Copy", Impatient)
    policy = SwapPolicy(min_bytes=1)
    links = slow_links(accelerator, policy, kinds.get(defect, Stalled))
    with swapped(model, policy, links=links), poisoned(model), queued_ahead(model, HALF_A_SECOND):
        found = [step(model, ids) for ids in batches]
        torch.accelerator.synchronize(accelerator)
    assert difference(found, expected) is not None
