# SPDX-License-Identifier: Apache-2.0
"""Field cases on identity and layout of storages: C05, C06, C07, C08, C10."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activation_swap import KeepReason
from tests.core.oracle import saves_of
from tests.faults.harness import apply, at_base, batch, everything, model_for
from tests.models import (
    Step,
    build,
    difference,
    forward,
    gradients,
    step,
    tokens,
    twins,
)

pytestmark = pytest.mark.usefixtures("exact")


def test_c05_a_reused_address_is_no_duplicate(device: torch.device) -> None:
    """Equal layers move equal bytes in each of three steps, each layer under its own name."""
    plain, model = model_for(device), model_for(device)
    layers = len(model.model.layers)
    expected = step(plain, batch(plain))
    swap: Any = apply(model)
    engine = swap._installation._engine
    launch = engine._offload
    moved: list[tuple[str, int]] = []

    def spy(group: Any, storages: Any) -> bool:
        moved.append((group.fqn, sum(storage.nbytes for storage in storages)))
        return launch(group, storages)

    engine._offload = spy
    for _ in range(3):
        moved.clear()
        assert difference(step(model, batch(model)), expected) is None
        assert [name for name, _ in moved] == [
            f"model.layers.{index}.self_attn" for index in range(layers - 1)
        ]
        assert len({nbytes for _, nbytes in moved}) == 1
    assert at_base(swap)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "expanded-mask"])
def test_c06_strides_and_offsets_are_kept(
    device: torch.device, attention: str, *, masked: bool
) -> None:
    """Attention on a slice of a larger tensor, with a mask expanded over the batch."""
    plain, model = twins(attention=attention, device=device)
    generator = torch.Generator().manual_seed(5)
    big = torch.randn(2, 16, 64, generator=generator).to(device)
    mask = torch.zeros(1, 1, 10, 10, device=device).expand(2, 1, 10, 10) if masked else None
    embeddings = plain.model.rotary_emb(big, torch.arange(10, device=device)[None])

    def run(model: Any) -> Step:
        model.zero_grad(set_to_none=True)
        leaf = big.clone().requires_grad_()
        hidden = (leaf * 1)[:, 3:13]
        for layer in model.model.layers:
            hidden, _ = layer.self_attn(
                hidden_states=hidden, position_embeddings=embeddings, attention_mask=mask
            )
        loss = hidden.square().sum()
        loss.backward()
        assert leaf.grad is not None
        return Step(loss.detach(), gradients(model) | {"leaf": leaf.grad})

    expected = run(plain)
    swap = apply(model, everything(device))
    assert difference(run(model), expected) is None
    kept = swap.stats().kept_bytes[KeepReason.ARGUMENT]
    # Of the kernels used here only the CPU's saves the mask.
    mask_is_saved = masked and attention == "sdpa" and device.type == "cpu"
    real = 2 * 10 * 16 * 4 + (10 * 10 * 4 if mask_is_saved else 0)
    assert kept == len(model.model.layers) * real


@pytest.mark.level0
def test_c06_every_unpacked_tensor_has_its_own_layout() -> None:
    """Size, stride, offset, dtype and bits of each saved tensor, compared at its unpack."""
    from activation_swap.core.packed_tensor import PackedTensor
    from activation_swap.core.recorder import Recorder

    model = build(attention="sdpa")
    packed: dict[int, tuple[Any, torch.Tensor]] = {}
    compared = 0
    pack, unpack = Recorder.pack, PackedTensor.unpack

    def spy_pack(self: Recorder, tensor: torch.Tensor) -> Any:
        handle = pack(self, tensor)
        layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        packed[id(handle)] = layout, tensor.detach().clone()
        return handle

    def spy_unpack(self: PackedTensor) -> torch.Tensor:
        nonlocal compared
        tensor = unpack(self)
        layout, value = packed[id(self)]
        assert (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype) == layout
        assert torch.equal(tensor, value)
        compared += 1
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "pack", spy_pack)
        patch.setattr(PackedTensor, "unpack", spy_unpack)
        apply(model)
        step(model, tokens(model))
    assert compared >= 3 * 15
    assert any(layout[1] != value.contiguous().stride() for layout, value in packed.values())


@pytest.mark.parametrize("case", ["trainable", "frozen", "autocast"])
def test_c07_parameters_do_not_move(device: torch.device, case: str) -> None:
    """Bytes out are those of the activations; a weight's storage is never among them."""
    plain, model = model_for(device), model_for(device)
    dtype = torch.bfloat16 if case == "autocast" else None
    if dtype is not None:
        plain, model = plain.float(), model.float()
    for one in (plain, model):
        one.model.embed_tokens.requires_grad_(case != "frozen")
        for layer in one.model.layers:
            layer.self_attn.k_proj.requires_grad_(case != "frozen")
            layer.self_attn.q_norm.requires_grad_(case != "frozen")
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    expected_saves = saves_of(model, lambda: forward(model, batch(model)))
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is not None):
        expected = step(plain, batch(plain))
        swap: Any = apply(model, everything(device))
        moved: set[int] = set()
        engine = swap._installation._engine
        launch = engine._offload

        def spy(group: Any, storages: Any) -> bool:
            moved.update(s.aliases[0][0].untyped_storage().data_ptr() for s in storages)
            return launch(group, storages)

        engine._offload = spy
        assert difference(step(model, batch(model)), expected) is None
    assert moved
    assert not moved & weights.keys()
    if case == "autocast":
        assert swap.stats().kept_bytes[KeepReason.PARAMETER] > 0
    else:
        assert swap.stats().saved_bytes <= sum(sum(s.moving.values()) for s in expected_saves)


class _SavesManyKinds(torch.autograd.Function):
    """Saves tensors of other devices, dtypes and sizes beside its input, and checks them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kinds = (
            torch.arange(2048, dtype=torch.float32),
            torch.arange(512, dtype=torch.int32, device=x.device),
            torch.tensor(7.0, device=x.device),
            torch.empty(0, 3, device=x.device),
            torch.arange(512, device=x.device) % 3 == 0,
        )
        ctx.expected = [(kind.device, kind.dtype, kind.clone()) for kind in kinds]
        ctx.save_for_backward(x, *kinds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _, *kinds = ctx.saved_tensors
        for tensor, (device, dtype, value) in zip(kinds, ctx.expected, strict=True):
            assert tensor.device == device
            assert tensor.dtype == dtype
            assert torch.equal(tensor, value)
        _SavesManyKinds.checked += 1
        return grads[0]

    checked = 0


def test_c08_each_tensor_comes_back_to_its_own_device(device: torch.device) -> None:
    plain, model = twins(device=device, attention="sdpa")
    for one in (plain, model):
        for layer in one.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args: (_SavesManyKinds.apply(args[0]),)
            )
    expected = step(plain, batch(plain, length=10))
    swap = apply(model, everything(device))
    _SavesManyKinds.checked = 0
    assert difference(step(model, batch(model, length=10)), expected) is None
    assert _SavesManyKinds.checked == 3
    if device.type != "cpu":
        assert swap.stats().kept_bytes[KeepReason.OTHER_DEVICE] >= 3 * 2048 * 4


def test_c10_returned_tensors_stay_valid(device: torch.device) -> None:
    """Attention weights and hidden states are read after forward and after backward."""
    plain, model = twins(attention="eager", device=device)

    def run(model: Any) -> tuple[Step, Any]:
        model.zero_grad(set_to_none=True)
        output = forward(model, tokens(model), output_attentions=True, output_hidden_states=True)
        returned = [t.detach().clone() for t in (*output.attentions, *output.hidden_states)]
        loss = output.loss + output.attentions[0].mean()
        loss.backward()
        later = [*output.attentions, *output.hidden_states]
        assert all(map(torch.equal, returned, later))
        return Step(loss.detach(), gradients(model)), returned

    expected, tensors = run(plain)
    swap = apply(model, everything(device))
    found, returned = run(model)
    assert difference(found, expected) is None
    assert len(returned) == len(tensors) == 3 + 4
    assert all(map(torch.equal, returned, tensors))
    assert swap.stats().offloaded_bytes > 0
