# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients have the bits of the un-swapped run, and something moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activation_swap import KeepReason, SwapPolicy
from tests.models import MID, build, difference, step, swapped, tokens, twins

pytestmark = pytest.mark.usefixtures("exact")

STRUCTURES = {
    "moe": {},
    "dense": {"mlp_only_layers": [0, 1, 2]},
    "dense-first": {"mlp_only_layers": [0]},
    "every-second-moe": {"decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "sliding-window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "router-logits": {"output_router_logits": True},
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_step_has_the_same_bits(
    device: torch.device, dtype: torch.dtype, attention: str, structure: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "attention": attention, "device": device}
    plain, model = twins(**options, **structure)
    ids = tokens(plain)
    expected = step(plain, ids)
    with swapped(model) as swap:
        found = step(model, ids)
        stats = swap.stats()
    assert difference(found, expected) is None
    assert stats.offloaded_bytes > 0
    assert stats.reloaded_bytes == stats.offloaded_bytes
    assert stats.live_groups == stats.resident_bytes == stats.host_bytes_in_use == 0


@pytest.mark.parametrize("keep_last", [True, False], ids=["keep-last", "move-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_policies_change_no_bit(
    device: torch.device, dtype: torch.dtype, *, keep_last: bool
) -> None:
    plain, model = twins(dtype=dtype, attention="sdpa", device=device)
    ids = tokens(plain)
    expected = step(plain, ids)
    crossed = {}
    for narrow in (True, False):
        policy = SwapPolicy(min_bytes=1, narrow=narrow, keep_last=keep_last, slab_bytes=1 << 16)
        with swapped(model, policy) as swap:
            assert difference(step(model, ids), expected) is None
            stats = swap.stats()
        assert (KeepReason.LAST in stats.kept_bytes) is keep_last
        crossed[narrow] = stats.offloaded_bytes
    # Only a bf16 model upcasts, in its norms.
    assert (crossed[True] < crossed[False]) is (dtype is torch.bfloat16)


def test_padding_mask(device: torch.device) -> None:
    plain, model = twins(attention="sdpa", device=device)
    ids = tokens(plain)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    expected = step(plain, ids, attention_mask=mask)
    with swapped(model) as swap:
        assert difference(step(model, ids, attention_mask=mask), expected) is None
        assert swap.stats().kept_bytes[KeepReason.ARGUMENT] > 0


@pytest.mark.parametrize("lengths", [(10, 10, 10), (10, 3, 17, 64)], ids=["equal", "mixed"])
def test_gradient_accumulation(device: torch.device, lengths: tuple[int, ...]) -> None:
    plain, model = twins(attention="sdpa", device=device)
    batches = [tokens(plain, length=n, seed=n + k) for k, n in enumerate(lengths)]
    expected = step(plain, *batches)
    with swapped(model):
        assert difference(step(model, *batches), expected) is None


def test_training_trajectory_with_dropout(device: torch.device) -> None:
    """Twenty updates on changing batches: the random numbers of dropout are drawn alike, too."""
    runs = []
    for swap in (False, True):
        model = build(attention_dropout=0.1, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with swapped(model) if swap else swapped(build(device=device)):
            torch.manual_seed(3)
            steps = []
            for seed in range(20):
                steps.append(step(model, tokens(model, seed=seed)))
                optimizer.step()
        runs.append(steps)
    assert difference(runs[1], runs[0]) is None
    assert difference(runs[0][1], runs[0][0]) is not None


def test_autocast_moves_no_cached_weight(device: torch.device) -> None:
    """Autocast's bf16 copy of a trainable fp32 weight stays in its cache, on the device."""
    plain, model = twins(attention="sdpa", device=device)
    ids = tokens(plain)
    with torch.autocast(device.type, torch.bfloat16):
        expected = step(plain, ids)
        with swapped(model) as swap:
            assert difference(step(model, ids), expected) is None
            stats = swap.stats()
    weights = sum(
        p.numel() * 2 for n, p in model.named_parameters() if "self_attn" in n and "proj" in n
    )
    assert stats.kept_bytes[KeepReason.PARAMETER] >= weights


@pytest.mark.level1
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("structure", ["moe", "dense"])
def test_mid_model_on_an_accelerator(
    accelerator: torch.device, attention: str, structure: str
) -> None:
    """bf16 and 2,048 tokens; first the plain run must repeat itself, or the test says nothing."""
    changes = {"mlp_only_layers": list(range(8))} if structure == "dense" else {}
    plain, model = twins(
        MID, dtype=torch.bfloat16, attention=attention, device=accelerator, **changes
    )
    ids = tokens(plain, length=2048)
    expected = step(plain, ids)
    assert difference(step(plain, ids), expected) is None
    with swapped(model, SwapPolicy()) as swap:
        assert difference(step(model, ids), expected) is None
        stats = swap.stats()
    assert stats.saved_bytes > 100 << 20
    assert stats.reload_misses == 0


@pytest.mark.level0
def test_min_bytes_keeps_what_is_small() -> None:
    plain, model = twins()
    ids = tokens(plain)
    expected = step(plain, ids)
    with swapped(model, SwapPolicy(min_bytes=4 * 2 * 10 * 64)) as swap:
        assert difference(step(model, ids), expected) is None
        stats = swap.stats()
    assert stats.kept_bytes[KeepReason.SMALL] > 0
    assert stats.offloaded_bytes > 0
