# SPDX-License-Identifier: Apache-2.0
"""What must hold on every supported Transformers release; the version matrix runs this file."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapPolicy, registry
from activation_swap.errors import Reason, RejectedError
from tests.models import build, difference, step, tokens, twins

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.matrix, pytest.mark.level0, pytest.mark.usefixtures("exact")]

EVERYTHING = SwapPolicy(min_bytes=0, keep_last=False)


def set_checkpointing(model: Any, arguments: dict[str, bool] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name is deprecated from 5.23 on
        if arguments is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def assert_trains_like(plain: Any, model: Any) -> None:
    ids = tokens(plain)
    assert difference(step(model, ids), step(plain, ids)) is None


def test_every_fact_holds() -> None:
    explanation = registry.explain(build())

    assert explanation.supported, str(explanation)
    assert not explanation.notices
    assert [site.fqn for site in explanation.sites] == [
        f"model.layers.{index}.self_attn" for index in range(3)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_bit_is_the_same(attention: str, dtype: torch.dtype) -> None:
    plain, model = twins(attention=attention, dtype=dtype)
    swap = registry.apply("attention", model, policy=EVERYTHING)

    for _ in range(2):
        assert_trains_like(plain, model)

    stats = swap.stats()
    assert min(stats.offloaded_bytes, stats.reloaded_bytes, stats.saved_bytes) > 0
    assert stats.live_groups == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_before_apply_is_refused(*, reentrant: bool) -> None:
    plain, model = twins()
    set_checkpointing(model, {"use_reentrant": reentrant})

    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", model, policy=EVERYTHING)
    assert refusal.value.reason is Reason.CHECKPOINTING_ON

    set_checkpointing(model, None)
    swap = registry.apply("attention", model, policy=EVERYTHING)
    assert_trains_like(plain, model)
    assert swap.stats().offloaded_bytes > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_after_apply_is_refused_at_the_next_forward(*, reentrant: bool) -> None:
    plain, model = twins()
    registry.apply("attention", model, policy=EVERYTHING)
    set_checkpointing(model, {"use_reentrant": reentrant})

    with pytest.raises(RejectedError) as refusal:
        step(model, tokens(model))
    assert refusal.value.reason is Reason.CHECKPOINTING_ENABLED_LATER
    # Up to torch 2.11 the checkpoint's own hooks stay active while the error's frames live.
    del refusal
    gc.collect()

    set_checkpointing(model, None)
    assert_trains_like(plain, model)


def test_names_and_checkpoint_files_are_unchanged(tmp_path: Path) -> None:
    model = build(attention="sdpa")
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    modules = {name: type(module) for name, module in model.named_modules()}
    registry.apply("attention", model, policy=EVERYTHING)
    step(model, tokens(model))

    assert list(model.state_dict()) == keys
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())

    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa").train()
    assert_trains_like(reloaded, model)


# The recorded outputs are what else holds the tensors that the attention saved.
@pytest.mark.filterwarnings("ignore:activation_swap. attention moved .* that something else holds")
def test_recorded_outputs_are_the_same_and_leave_nothing_in_the_way() -> None:
    plain, model = twins()
    ids = tokens(model)
    asked = {"output_attentions": True, "output_router_logits": True, "output_hidden_states": True}
    expected = plain(input_ids=ids, labels=ids, use_cache=False, **asked)
    model(input_ids=ids, **asked)  # 4.54 to 5.1 leave a forward behind, 5.2 and later hooks
    swap = registry.apply("attention", model, policy=EVERYTHING)

    output = model(input_ids=ids, labels=ids, use_cache=False, **asked)

    for name in ("attentions", "router_logits", "hidden_states"):
        recorded, reference = getattr(output, name), getattr(expected, name)
        assert len(recorded) == len(reference) >= 3
        assert all(torch.equal(a, b) for a, b in zip(recorded, reference, strict=True))
    assert torch.equal(output.loss, expected.loss)
    del output
    swap.reset_stats()
    assert_trains_like(plain, model)
    assert swap.stats().offloaded_bytes > 0


def test_generate_in_mid_training_moves_nothing() -> None:
    plain, model = twins()
    swap = registry.apply("attention", model, policy=EVERYTHING)
    assert_trains_like(plain, model)
    swap.reset_stats()

    texts = []
    for each in (plain, model):
        each.eval()
        prompt = tokens(each, length=4)
        texts.append(
            each.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )
        )
        each.train()

    assert torch.equal(*texts)
    assert swap.stats().offloaded_bytes == swap.stats().live_groups == 0
    assert_trains_like(plain, model)
