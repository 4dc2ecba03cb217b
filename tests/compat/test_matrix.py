"""What must hold on every supported Transformers release; the version matrix runs this file."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapPolicy, registry
from activation_swap.errors import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.compat.conftest import ModelFactory, Step

pytestmark = [pytest.mark.matrix, pytest.mark.level0]

EVERYTHING = SwapPolicy(min_bytes=0, keep_last=False)


def set_checkpointing(model: Any, arguments: dict[str, bool] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name is deprecated from 5.23 on
        if arguments is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def test_every_fact_holds(make_model: ModelFactory) -> None:
    explanation = registry.explain(make_model())

    assert explanation.supported, str(explanation)
    assert not explanation.notices
    assert [site.fqn for site in explanation.sites] == [
        f"model.layers.{index}.self_attn" for index in range(3)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_bit_is_the_same(
    make_model: ModelFactory,
    train_step: Callable[..., Step],
    attention: str,
    dtype: torch.dtype,
) -> None:
    plain = train_step(make_model(attention=attention, dtype=dtype))
    model = make_model(attention=attention, dtype=dtype)
    swap = registry.apply("attention", model, policy=EVERYTHING)

    first, second = train_step(model), train_step(model)

    assert first.equals(plain)
    assert second.equals(plain)
    stats = swap.stats()
    assert min(stats.offloaded_bytes, stats.reloaded_bytes, stats.saved_bytes) > 0
    assert stats.live_groups == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_before_apply_is_refused(
    make_model: ModelFactory,
    train_step: Callable[..., Step],
    *,
    reentrant: bool,
) -> None:
    plain = train_step(make_model())
    model = make_model()
    set_checkpointing(model, {"use_reentrant": reentrant})

    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", model, policy=EVERYTHING)
    assert refusal.value.reason is Reason.CHECKPOINTING_ON

    set_checkpointing(model, None)
    swap = registry.apply("attention", model, policy=EVERYTHING)
    assert train_step(model).equals(plain)
    assert swap.stats().offloaded_bytes > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_after_apply_is_refused_at_the_next_forward(
    make_model: ModelFactory,
    train_step: Callable[..., Step],
    *,
    reentrant: bool,
) -> None:
    plain = train_step(make_model())
    model = make_model()
    registry.apply("attention", model, policy=EVERYTHING)
    set_checkpointing(model, {"use_reentrant": reentrant})

    with pytest.raises(RejectedError) as refusal:
        train_step(model)
    assert refusal.value.reason is Reason.CHECKPOINTING_ENABLED_LATER

    set_checkpointing(model, None)
    assert train_step(model).equals(plain)


def test_names_and_checkpoint_files_are_unchanged(
    make_model: ModelFactory,
    train_step: Callable[..., Step],
    tmp_path: Path,
) -> None:
    model = make_model()
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    modules = {name: type(module) for name, module in model.named_modules()}
    registry.apply("attention", model, policy=EVERYTHING)
    step = train_step(model)

    assert list(model.state_dict()) == keys
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())

    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa").train()
    assert train_step(reloaded).equals(step)


# The recorded outputs are what else holds the tensors that the attention saved.
@pytest.mark.filterwarnings("ignore:activation_swap. attention moved .* that something else holds")
def test_recorded_outputs_are_the_same_and_leave_nothing_in_the_way(
    make_model: ModelFactory, train_step: Callable[..., Step], tokens: torch.Tensor
) -> None:
    plain, model = make_model(attention="eager"), make_model(attention="eager")
    asked = {"output_attentions": True, "output_router_logits": True, "output_hidden_states": True}
    expected = plain(input_ids=tokens, labels=tokens, use_cache=False, **asked)
    model(input_ids=tokens, **asked)  # 4.54 to 5.1 leave a forward behind, 5.2 and later hooks
    swap = registry.apply("attention", model, policy=EVERYTHING)

    output = model(input_ids=tokens, labels=tokens, use_cache=False, **asked)

    for name in ("attentions", "router_logits", "hidden_states"):
        recorded, reference = getattr(output, name), getattr(expected, name)
        assert len(recorded) == len(reference) >= 3
        assert all(torch.equal(a, b) for a, b in zip(recorded, reference, strict=True))
    assert torch.equal(output.loss, expected.loss)
    del output
    swap.reset_stats()
    assert train_step(model).equals(train_step(plain))
    assert swap.stats().offloaded_bytes > 0


def test_generate_in_mid_training_moves_nothing(
    make_model: ModelFactory, train_step: Callable[..., Step], tokens: torch.Tensor
) -> None:
    plain, model = make_model(), make_model()
    swap = registry.apply("attention", model, policy=EVERYTHING)
    assert train_step(model).equals(train_step(plain))
    swap.reset_stats()

    texts = []
    for each in (plain, model):
        each.eval()
        prompt = tokens[:, :4]
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
    assert train_step(model).equals(train_step(plain))
