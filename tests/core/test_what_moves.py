# SPDX-License-Identifier: Apache-2.0
"""Exactly the storages that attention alone saves move; nothing else of the model does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.recorder import Recorder
from tests.core.chain import Chain, equal, install_chain, run
from tests.core.oracle import eligible_bytes, saves_of
from tests.models import build, forward, gradients, step, swapped, tokens, twins

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("exact")

MOVES_ALL = SwapPolicy(min_bytes=1, min_coverage=0.0, keep_last=False, narrow=False)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """Collect every tensor that any recorder packs, with the name of its attention."""
    seen: list[tuple[str, torch.Tensor]] = []
    pack = Recorder.pack

    def spy(self: Recorder, tensor: torch.Tensor) -> Any:
        seen.append((self.group.fqn, tensor.detach()))
        return pack(self, tensor)

    monkeypatch.setattr(Recorder, "pack", spy)
    return seen


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_are_those_of_an_independent_account(
    device: torch.device, dtype: torch.dtype, attention: str
) -> None:
    model = build(dtype=dtype, attention=attention, device=device)
    ids = tokens(model)
    expected = saves_of(model, lambda: forward(model, ids))
    with swapped(model, MOVES_ALL) as swap:
        step(model, ids)
        stats = swap.stats()
    assert stats.offloaded_bytes == sum(sum(call.moving.values()) for call in expected)
    assert stats.offloaded_storages == sum(len(call.moving) for call in expected)
    kept = {
        KeepReason.ARGUMENT: sum(sum(call.arguments.values()) for call in expected),
        KeepReason.OTHER_DEVICE: sum(sum(call.elsewhere.values()) for call in expected),
        KeepReason.PARAMETER: sum(sum(call.parameters.values()) for call in expected),
    }
    assert stats.kept_bytes == {reason: nbytes for reason, nbytes in kept.items() if nbytes}


@pytest.mark.level0
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_only_saves_of_attention_are_packed(
    packed: list[tuple[str, torch.Tensor]], attention: str
) -> None:
    """The counts per module: norms, residuals, MLP, MoE and router pack nothing."""
    plain, model = twins(attention=attention)
    ids = tokens(plain)
    expected = saves_of(plain, lambda: forward(plain, ids))
    with swapped(model, MOVES_ALL):
        step(model, ids)
    names = [name for name, _ in packed]
    assert {name: names.count(name) for name in names} == {
        f"model.layers.{index}.self_attn": call.packs for index, call in enumerate(expected)
    }


@pytest.mark.level0
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_parameters_never_move(moved: set[int], *, frozen: bool) -> None:
    """A weight is saved as a transposed view of plain type; its storage must stay."""
    model = build()
    if frozen:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_(False)
            layer.self_attn.k_norm.weight.requires_grad_(False)
    addresses = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with swapped(model, MOVES_ALL):
        step(model, tokens(model))
    assert moved
    assert not moved & addresses


@pytest.mark.level0
def test_mlp_moe_and_norms_keep_their_bytes() -> None:
    """Everything saved outside of ``self_attn`` is on the device during the forward."""
    model = build()
    ids = tokens(model)
    per_layer = eligible_bytes(model, lambda: forward(model, ids))
    with swapped(model, MOVES_ALL) as swap:
        output = forward(model, ids)
        assert swap.stats().saved_bytes == sum(per_layer[:-1])
        assert swap.stats().host_bytes_in_use >= sum(per_layer)
        del output


@pytest.mark.level0
def test_groups_are_kept_apart_by_call() -> None:
    """Two forwards of one module before any backward: each has data of its own."""
    plain, model = twins()
    first, second = tokens(plain, seed=1), tokens(plain, seed=2)
    losses = [forward(plain, ids).loss for ids in (first, second)]
    expected = [torch.autograd.grad(loss, list(plain.parameters())) for loss in losses]
    with swapped(model) as swap:
        losses = [forward(model, ids).loss for ids in (first, second)]
        assert swap.stats().live_groups == 6
        found = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("flat_first", [False, True])
def test_a_nested_tensor_stays(*, flat_first: bool) -> None:
    """It has a storage, and neither size nor stride."""

    def inner(value: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([value[0], value[1, :2]])
        if flat_first:
            value = value.sin() * nested.values().sin().mean()
        return value.sin() * (nested * nested).values().mean().sin()

    assert_nested_stays(inner)


def test_a_jagged_tensor_stays() -> None:
    """Its offsets are its size: rebuilt from other offsets, it would fit no other such tensor."""

    def inner(value: torch.Tensor) -> torch.Tensor:
        parts = [value[0], value[1, :2]]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        return value.sin() * (nested * nested.sin()).values().mean()

    assert_nested_stays(inner)


def assert_nested_stays(inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain, chain = Chain(), Chain()
    for one in (plain, chain):
        one.attentions[0].inner = inner
    swap = install_chain(chain)
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert equal(run(chain, hidden), run(plain, hidden))
    assert swap.stats().kept_bytes.get(KeepReason.UNSUPPORTED, 0) > 0


def test_an_integer_of_few_bits_stays() -> None:
    """Torch cannot copy it."""
    uint4: torch.dtype = vars(torch)["uint4"]
    few = torch.zeros(64, dtype=torch.uint8).view(uint4)

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(few)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            assert ctx.saved_tensors[0].dtype is uint4
            return grads[0]

    chain = Chain()
    chain.attentions[0].inner = Keeps.apply
    swap = install_chain(chain)
    run(chain, torch.ones(5, 8, requires_grad=True))
    assert swap.stats().kept_bytes[KeepReason.UNSUPPORTED] == few.nbytes


def test_an_unsupported_storage_is_counted_once() -> None:
    tagged = torch.ones(5, 8, requires_grad=True).as_subclass(Tagged)
    chain = Chain()
    chain.attentions[0].inner = lambda value: (
        value * (tagged * tagged * tagged).as_subclass(torch.Tensor)
    )
    swap = install_chain(chain)
    run(chain, torch.ones(5, 8, requires_grad=True))
    # The leaf, its square, and its cube as the product saves it.
    assert swap.stats().kept_bytes[KeepReason.UNSUPPORTED] == 2 * tagged.nbytes


class Tagged(torch.Tensor):
    """A subclass that is no wrapper."""


def test_what_the_attention_drops_is_gone() -> None:
    """A graph that it made and threw away is neither held nor copied."""
    gone: list[bool] = []

    def inner(value: torch.Tensor) -> torch.Tensor:
        thrown = value.detach().requires_grad_().exp().exp()
        storage = thrown.untyped_storage()._weak_ref()
        del thrown
        gone.append(bool(torch.UntypedStorage._expired(storage)))
        torch.UntypedStorage._free_weak_ref(storage)
        return value

    plain, chain = Chain(), Chain()
    swap, reference = install_chain(chain), install_chain(plain)
    chain.attentions[0].inner = inner
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert equal(run(chain, hidden), run(plain, hidden))
    assert gone == [True]
    assert swap.stats().offloaded_bytes == reference.stats().offloaded_bytes


@pytest.mark.parametrize("grad", [False, True])
def test_a_batch_of_vmap_has_no_address(*, grad: bool) -> None:
    hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=grad)
    plain, chain = Chain(), Chain()
    swap = install_chain(chain)
    losses = [torch.vmap(one)(hidden).sum() for one in (plain, chain)]
    losses[0].backward()
    losses[1].backward()
    assert equal(gradients(chain), gradients(plain))
    assert swap.stats().offloaded_bytes > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_zero_of_forward_mode_has_no_address() -> None:
    """A Hessian-vector product, forward over reverse."""
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for swaps in (False, True):
        chain = Chain()
        swap = install_chain(chain) if swaps else None
        with forward_ad.dual_level():
            loss = chain(forward_ad.make_dual(hidden, torch.ones_like(hidden)))
            tangent = forward_ad.unpack_dual(loss).tangent
            assert tangent is not None
            found.append(torch.autograd.grad(tangent, list(chain.parameters())))
        assert swap is None or swap.stats().offloaded_bytes > 0
    assert all(map(torch.equal, *found))
