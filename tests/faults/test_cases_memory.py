# SPDX-License-Identifier: Apache-2.0
"""Field cases on memory of the device and of the host: C12, C13, C14, C16, C48."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.pinned_pool import aligned
from tests.core.oracle import eligible_bytes
from tests.faults.harness import apply, at_base, batch, fails_at_slab, model_for, policy_for
from tests.models import (
    EVERYTHING,
    MID,
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

pytestmark = pytest.mark.usefixtures("exact")

MIB = 1 << 20


def allocated(device: torch.device) -> int:
    """Return what the device's allocator has handed out; 0 on a CPU, which does not count."""
    gc.collect()
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


@pytest.mark.parametrize("keep_last", [True, False], ids=["keep-last", "move-last"])
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
def test_c12_memory_returns_to_its_base(
    device: torch.device, *, narrow: bool, keep_last: bool
) -> None:
    """Five steps, backward called by another function, in every mode of the policy."""
    plain, model = model_for(device), model_for(device)
    expected = step(plain, batch(plain))
    policy = SwapPolicy(min_bytes=policy_for(device).min_bytes, narrow=narrow, keep_last=keep_last)

    def only_forward() -> torch.Tensor:
        return forward(model, batch(model)).loss

    def only_backward(loss: torch.Tensor) -> Step:
        loss.backward()
        return Step(loss.detach().reshape(1), gradients(model))

    with swapped(model, policy) as swap:
        bases = []
        for _ in range(5):
            found = only_backward(only_forward())
            assert difference(found, expected) is None
            del found
            model.zero_grad(set_to_none=True)
            assert at_base(swap)
            bases.append(allocated(device))
        assert max(bases[1:]) - min(bases[1:]) <= MIB


@pytest.mark.level0
def test_c13_device_keeps_two_groups_at_most() -> None:
    """By the engine's own count: the sum of all layers but two is given up."""
    model = build(num_hidden_layers=8)
    per_layer = eligible_bytes(model, lambda: forward(model, tokens(model)))
    with swapped(model) as swap:
        step(model, tokens(model))
        stats = swap.stats()
    assert stats.resident_bytes_peak <= 2 * max(per_layer)
    assert stats.saved_bytes == sum(per_layer[:-1])


@pytest.mark.level1
def test_c13_peak_falls_by_what_was_moved(accelerator: torch.device) -> None:
    """32 layers, no host sync of ours in the loop: allocated and reserved peaks, off and on."""
    shape = MID | {"num_hidden_layers": 32}
    allocated_peak, reserved_peak, saved = {}, {}, 0
    for mode in ("none", "attention"):
        model = build(shape, attention="sdpa", dtype=torch.bfloat16, device=accelerator)
        swap = apply(model) if mode == "attention" else None
        ids = tokens(model, length=2048)
        for measured in (False, True):
            if measured:
                torch.accelerator.synchronize(accelerator)
                gc.collect()
                torch.accelerator.empty_cache()
                torch.accelerator.reset_peak_memory_stats(accelerator)
                if swap is not None:
                    swap.reset_stats()
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                forward(model, ids).loss.backward()
        allocated_peak[mode] = torch.accelerator.max_memory_allocated(accelerator)
        reserved_peak[mode] = torch.accelerator.max_memory_reserved(accelerator)
        if swap is not None:
            saved = swap.stats().saved_bytes // 3
            swap.remove()
        del model, swap
        gc.collect()
        torch.accelerator.empty_cache()
    # The last layer stays and is not in `saved`; one more may be in flight.
    assert allocated_peak["none"] - allocated_peak["attention"] >= 0.8 * saved * 30 / 31
    assert reserved_peak["attention"] <= reserved_peak["none"]


def test_c14_pinned_memory_is_not_rounded_up(device: torch.device) -> None:
    """Sizes 1.125 times a power of two: reserved at most 1.25 x A per microbatch out + 64 MiB."""
    plain, model = model_for(device), model_for(device)
    ids = batch(model, length=18 if device.type == "cpu" else 2304)
    before = pinned(device)
    expected = step(plain, ids, ids)
    with swapped(model, SwapPolicy(min_bytes=policy_for(device).min_bytes)) as swap:
        losses = [forward(model, ids).loss for _ in range(2)]
        out = swap.stats().offloaded_bytes
        reserved = swap.stats().host_bytes_reserved
        assert reserved <= 1.25 * out + 64 * MIB
        assert out <= swap.stats().host_bytes_in_use <= 1.01 * out + 64 * aligned(1)
        # torch's pinned allocator must not have rounded the slabs up, either. It pins a few bytes
        # of its own for scalars that are read from the device.
        assert pinned(device) - before <= reserved + 64
        for loss in losses:
            loss.backward()
        found = Step(torch.stack(losses).detach(), gradients(model))
        assert difference(found, expected) is None


def pinned(device: torch.device) -> int:
    """Return the bytes that torch's pinned allocator holds, where it says so."""
    statistics: Any = getattr(torch.get_device_module(device), "host_memory_stats", None)
    if device.type == "cpu" or statistics is None:
        return 0
    return int(statistics().get("allocated_bytes.current", 0))


@pytest.mark.parametrize(
    ("number", "groups"),
    [(0, 0), (1, 0), (2, 1), (3, 1)],
    ids=["first", "within-first-group", "second-group", "within-second-group"],
)
def test_c16_exhausted_pinned_memory(device: torch.device, number: int, groups: int) -> None:
    """Training goes on, on the device, with one warning that names bytes and setting."""
    plain, model = model_for(device), model_for(device)
    slab = 24 * 1024 if device.type == "cpu" else 28 * MIB  # a group needs two
    policy = SwapPolicy(min_bytes=policy_for(device).min_bytes, slab_bytes=slab)
    expected = step(plain, batch(plain))
    swap = install(model, policy, links=fails_at_slab(number, policy=policy))
    with pytest.warns(RuntimeWarning) as seen:
        found = [step(model, batch(model)) for _ in range(3)]
    assert difference(found, [expected] * 3) is None
    (message,) = [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]
    assert "pinned host memory" in message
    assert f"{2 * slab} bytes asked for: CUDA error: out of memory" in message
    assert "activation_swap: attention" in message
    stats = swap.stats()
    assert stats.kept_bytes[KeepReason.HOST_MEMORY] > 0
    assert stats.host_bytes_reserved == number * slab
    one_group = stats.kept_bytes[KeepReason.LAST] // 3
    assert stats.saved_bytes == groups * 3 * one_group
    assert at_base(swap)
    swap.remove()
    assert difference(step(model, batch(model)), expected) is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_c48_bytes_move_and_residency_falls(device: torch.device, attention: str) -> None:
    plain, model = model_for(device), model_for(device)
    for one in (plain, model):
        one.set_attn_implementation(attention)
    expected = step(plain, batch(plain))
    swap = apply(model)
    assert difference(step(model, batch(model)), expected) is None
    stats = swap.stats()
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    kept_last = stats.kept_bytes[KeepReason.LAST]
    assert stats.resident_bytes_peak < stats.saved_bytes + kept_last


@pytest.mark.level0
def test_c48_positional_and_keyword_arguments_arrive_unchanged() -> None:
    """Also those that the attention does not know, such as the lengths of a packed batch."""
    model = build()
    attention = model.model.layers[0].self_attn
    seen: list[tuple[Any, Any]] = []
    hidden = torch.randn(1, 4, 64, requires_grad=True)
    embeddings = model.model.rotary_emb(hidden, torch.arange(4)[None])
    extra = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4}
    swap = apply(model)
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    one = attention(hidden, embeddings, None, **extra)
    other = attention(
        hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, **extra
    )
    assert torch.equal(one[0], other[0])
    assert seen[0][0] == (hidden, embeddings, None)
    for _, kwargs in seen:
        assert {name: kwargs[name] for name in extra} == extra
    del one
    other[0].sum().backward()
    assert swap.stats().offloaded_bytes > 0


@pytest.mark.level0
def test_c48_a_step_that_moves_nothing_says_why() -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))
    swap = apply(model, SwapPolicy())
    with pytest.warns(RuntimeWarning, match="moved nothing.*small: [1-9]"):
        first = step(model, tokens(model))
    second = step(model, tokens(model))
    assert difference([first, second], [expected] * 2) is None
    assert swap.stats().offloaded_bytes == 0


@pytest.mark.level0
def test_c48_reserved_memory_stays_when_lengths_change() -> None:
    """Two hundred steps of lengths drawn anew; the bound is the largest step's, plus a slab."""
    model = build(attention="sdpa")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (200,), generator=generator).tolist()
    with swapped(model) as swap:
        most = 0
        for length in lengths:
            loss = forward(model, tokens(model, length=length)).loss
            most = max(most, swap.stats().host_bytes_in_use)
            loss.backward()
            assert swap.stats().host_bytes_reserved <= most + EVERYTHING.slab_bytes
        assert at_base(swap)
    assert swap.stats().host_bytes_reserved == 0
