# SPDX-License-Identifier: Apache-2.0
"""Random histories of training against a model of the swap: gradients, bytes, nothing left over.

Each rule does one thing that a trainer may do, to a plain model and to its swapped twin. A small
account predicts for every graph that is alive which layers are on the device and which on the host.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from activation_swap.core.pinned_pool import aligned
from activation_swap.core.torch_private import top_saved_tensor_hooks
from tests.core.oracle import saves_of
from tests.models import VERY_TINY, build, forward, gradients, install, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from activation_swap.core.install import InstalledSwap

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]

LAYERS = 3
SHAPES = (
    VERY_TINY | {"num_hidden_layers": LAYERS},
    VERY_TINY | {"num_hidden_layers": LAYERS, "hidden_size": 24, "mlp_only_layers": [1]},
)
LENGTHS = st.sampled_from([1, 2, 5, 9])
WHICH = st.integers(0, len(SHAPES) - 1)


class PlannedError(RuntimeError):
    """The exception that the machine raises in the middle of a model."""


@dataclass(eq=False)
class Account:
    """What one graph of the swapped model holds, layer by layer, as the design says."""

    device: list[int]
    host: list[int]
    reloaded: set[int]

    @classmethod
    def after_forward(cls, layers: list[tuple[int, int]]) -> Account:
        """All layers but the last are on the host."""
        device, host = zip(*layers, strict=True)
        return cls(list(device), list(host), {LAYERS - 1})

    def backward_down_to(self, layer: int) -> None:
        """Every layer that backward reaches is back, and the one after it is on its way."""
        self.reloaded |= set(range(max(0, layer - 1), LAYERS))

    @property
    def resident(self) -> int:
        return sum(self.device[index] for index in self.reloaded)

    @property
    def pinned(self) -> int:
        return sum(self.host[index] for index in range(LAYERS) if index not in self.reloaded)


@dataclass(eq=False)
class Graph:
    """One forward of both twins."""

    which: int
    plain: Any
    swapped: Any
    account: Account | None


@dataclass(eq=False)
class Pair:
    """A plain model, its swapped twin, and what the twin's attention saves, by length."""

    plain: Any
    swapped: Any
    swap: InstalledSwap | None
    saves: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)

    def layers(self, ids: torch.Tensor) -> list[tuple[int, int]]:
        """Return (device bytes, pinned bytes) of each layer."""
        length = ids.shape[1]
        if length not in self.saves:
            calls = saves_of(self.plain, lambda: forward(self.plain, ids))
            self.saves[length] = [
                (sum(call.moving.values()), sum(map(aligned, call.moving.values())))
                for call in calls
            ]
        return self.saves[length]

    def both(self, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        return run(self.plain), run(self.swapped)


@contextmanager
def raising(module: Any, *, error: type[BaseException] = PlannedError) -> Iterator[None]:
    """Raise when a module is called."""

    def fail(*_: Any) -> None:
        raise error

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


class Training(RuleBasedStateMachine):
    """What may happen, in any order."""

    graphs = Bundle("graphs")
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.pairs = []
        self.seed = 0
        for shape in SHAPES:
            plain, swapped = build(shape), build(shape)
            self.pairs.append(Pair(plain, swapped, install(swapped)))

    def ids(self, which: int, length: int) -> torch.Tensor:
        self.seed += 1
        return tokens(self.pairs[which].plain, batch=1, length=length, seed=self.seed)

    @rule(target=graphs, which=WHICH, length=LENGTHS)
    def forward(self, which: int, length: int) -> Any:
        return multiple(self.new_graph(which, length))

    @rule(target=graphs, lengths=st.lists(LENGTHS, min_size=2, max_size=3))
    def microbatches(self, lengths: list[int]) -> Any:
        """Several forwards of one model before any backward."""
        return multiple(*(self.new_graph(0, length) for length in lengths))

    @rule(target=graphs, lengths=st.tuples(LENGTHS, LENGTHS))
    def both_models(self, lengths: tuple[int, int]) -> Any:
        return multiple(*(self.new_graph(which, length) for which, length in enumerate(lengths)))

    def new_graph(self, which: int, length: int) -> Graph:
        pair, ids = self.pairs[which], self.ids(which, length)
        plain, swapped = pair.both(lambda m: forward(m, ids, output_hidden_states=True))
        assert torch.equal(plain.logits, swapped.logits)
        account = None
        if pair.swap is not None:
            account = Account.after_forward(pair.layers(ids))
            pair.accounts.append(account)
        return Graph(which, plain, swapped, account)

    @rule(
        which=WHICH,
        length=LENGTHS,
        kind=st.sampled_from(["no grad", "inference", "thread", "remove or apply"]),
    )
    def between(self, which: int, length: int, kind: str) -> None:
        """Do what ends with no new graph."""
        if kind == "thread":
            self.step_in_a_thread(which, length)
        elif kind == "remove or apply":
            self.apply_or_remove(which)
        else:
            self.forward_without_grad(which, length, inference=kind == "inference")

    def forward_without_grad(self, which: int, length: int, *, inference: bool) -> None:
        ids = self.ids(which, length)
        with torch.inference_mode() if inference else torch.no_grad():
            plain, swapped = self.pairs[which].both(lambda m: forward(m, ids))
        assert torch.equal(plain.logits, swapped.logits)

    @rule(graph=consumes(graphs))
    def backward(self, graph: Graph) -> None:
        self.run(graph, lambda out: out.loss.backward(), frees=True)

    @rule(target=graphs, graph=consumes(graphs))
    def backward_retained(self, graph: Graph) -> Any:
        self.run(graph, lambda out: out.loss.backward(retain_graph=True))
        if graph.account is not None:
            graph.account.backward_down_to(0)
        return multiple(graph)

    @rule(graph=consumes(graphs))
    def two_losses(self, graph: Graph) -> None:
        def run(out: Any) -> None:
            out.hidden_states[2].square().sum().backward(retain_graph=True)
            out.loss.backward()

        self.run(graph, run, frees=True)

    @rule(target=graphs, graph=consumes(graphs), layer=st.integers(0, LAYERS - 1))
    def grad_of_some_layers(self, graph: Graph, layer: int) -> Any:
        """Backward stops at a layer's own parameters."""
        pair = self.pairs[graph.which]

        def run(model: Any, out: Any) -> list[Any]:
            weights = list(model.model.layers[layer].self_attn.parameters())
            return list(torch.autograd.grad(out.loss, weights, retain_graph=True))

        found = run(pair.swapped, graph.swapped)
        expected = run(pair.plain, graph.plain)
        assert all(map(torch.equal, found, expected))
        if graph.account is not None:
            graph.account.backward_down_to(layer)
        return multiple(graph)

    @rule(graph=consumes(graphs))
    def double_backward(self, graph: Graph) -> None:
        pair = self.pairs[graph.which]

        def run(model: Any, out: Any) -> tuple[Any, dict[str, torch.Tensor]]:
            model.zero_grad(set_to_none=True)
            weight = model.model.layers[1].self_attn.k_proj.weight
            (first,) = torch.autograd.grad(out.loss, weight, create_graph=True)
            first.square().sum().backward()
            return first.detach(), gradients(model)

        (first, found), (one, expected) = (
            run(pair.swapped, graph.swapped),
            run(pair.plain, graph.plain),
        )
        assert torch.equal(first, one)
        self.same(found, expected)
        self.end(graph)

    @rule(graph=consumes(graphs))
    def drop(self, graph: Graph) -> None:
        self.end(graph)

    @rule(graph=consumes(graphs))
    def exception_in_loss(self, graph: Graph) -> None:
        def lossy(out: Any) -> None:
            loss = out.loss * 2
            loss.register_hook(lambda _: None)
            message = "planned"
            raise PlannedError(message)

        for out in (graph.plain, graph.swapped):
            with pytest.raises(PlannedError):
                lossy(out)
        self.end(graph)

    @rule(graph=consumes(graphs), layer=st.integers(1, LAYERS))
    def exception_in_backward(self, graph: Graph, layer: int) -> None:
        """A hook on a hidden state raises, with some groups reloaded and some not."""

        def fail(_: Any) -> None:
            raise PlannedError

        for out in (graph.plain, graph.swapped):
            handle = out.hidden_states[layer].register_hook(fail)
            with pytest.raises(PlannedError):
                out.loss.backward()
            handle.remove()
        self.end(graph)

    @rule(
        which=WHICH,
        length=LENGTHS,
        layer=st.integers(0, LAYERS - 1),
        place=st.sampled_from(
            ["self_attn", "self_attn.q_norm", "self_attn.o_proj", "mlp", "post_attention_layernorm"]
        ),
        error=st.sampled_from([PlannedError, KeyboardInterrupt]),
    )
    def exception_in_forward(
        self, which: int, length: int, layer: int, place: str, error: type[BaseException]
    ) -> None:
        """Anywhere in a layer; also one that module hooks do not see."""
        ids = self.ids(which, length)
        for model in (self.pairs[which].plain, self.pairs[which].swapped):
            module = model.model.layers[layer].get_submodule(place)
            with raising(module, error=error), pytest.raises(error):
                forward(model, ids)
        # What an interrupt left open is mended by the next training forward, or by remove.
        self.pairs[which].swapped.zero_grad(set_to_none=True)
        forward(self.pairs[which].swapped, ids)

    def step_in_a_thread(self, which: int, length: int) -> None:
        ids = self.ids(which, length)
        pair = self.pairs[which]
        found: list[Any] = []

        def run() -> None:
            torch.set_num_threads(1)
            for model in (pair.plain, pair.swapped):
                model.zero_grad(set_to_none=True)
                forward(model, ids).loss.backward()
                found.append(gradients(model))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        self.same(found[1], found[0])

    @rule(graph=consumes(graphs))
    def backward_in_a_thread(self, graph: Graph) -> None:
        def run(out: Any) -> None:
            worker = threading.Thread(target=out.loss.backward)
            worker.start()
            worker.join()

        self.run(graph, run, frees=True)

    def apply_or_remove(self, which: int) -> None:
        """Graphs that are alive stay right, and keep the memory that they need."""
        pair = self.pairs[which]
        if pair.swap is None:
            pair.swap = install(pair.swapped)
        else:
            swap, pair.swap = pair.swap, None
            swap.remove()
            assert swap.stats().host_bytes_reserved == 0
        # A graph of an earlier installation is no business of a later one.
        pair.accounts = []

    def run(self, graph: Graph, backward: Callable[[Any], None], *, frees: bool = False) -> None:
        pair = self.pairs[graph.which]
        found = []
        for model, out in ((pair.plain, graph.plain), (pair.swapped, graph.swapped)):
            model.zero_grad(set_to_none=True)
            backward(out)
            found.append(gradients(model))
        self.same(found[1], found[0])
        if frees:
            self.end(graph)

    def same(self, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        assert found.keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())

    def end(self, graph: Graph) -> None:
        accounts = self.pairs[graph.which].accounts
        if graph.account in accounts:
            accounts.remove(graph.account)
        graph.plain = graph.swapped = None

    @invariant()
    def holds_what_the_account_says(self) -> None:
        type(self).steps += 1
        gc.collect(1)
        for pair in self.pairs:
            if pair.swap is None:
                continue
            stats = pair.swap.stats()
            if stats.live_groups != LAYERS * len(pair.accounts):
                gc.collect()
                stats = pair.swap.stats()
            assert stats.live_groups == LAYERS * len(pair.accounts)
            assert stats.resident_bytes == sum(a.resident for a in pair.accounts)
            assert stats.host_bytes_in_use == sum(a.pinned for a in pair.accounts)
        assert top_saved_tensor_hooks() is None

    def teardown(self) -> None:
        for pair in self.pairs:
            if pair.swap is not None:
                pair.swap.remove()


def test_random_histories(record_property: Any) -> None:
    Training.steps = 0
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    record_property("actions", Training.steps)
    assert Training.steps > 500
