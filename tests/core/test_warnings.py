# SPDX-License-Identifier: Apache-2.0
"""What a training forward warns of, once: a key-value cache, and a swap that moves nothing."""

from __future__ import annotations

import warnings

import pytest
import torch

from activation_swap import SwapPolicy, registry
from tests.core.chain import Chain, install_chain, run
from tests.models import build, gradients, tokens

pytestmark = pytest.mark.level0


def test_use_cache_is_named_once_and_changes_no_bit() -> None:
    plain, model = build(), build()
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    ids = tokens(model)
    plain(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    with pytest.warns(RuntimeWarning, match="use_cache=False") as seen:
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    assert [warning.filename for warning in seen] == [__file__]
    expected = gradients(plain)
    assert all(torch.equal(v, expected[k]) for k, v in gradients(model).items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()


def test_generation_is_not_training() -> None:
    model = build()
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(tokens(model), max_new_tokens=2, do_sample=False)


def test_a_step_inside_of_a_step_is_no_reason_to_warn() -> None:
    chain = Chain()
    ran: list[int] = []

    def between(index: int, hidden: torch.Tensor) -> torch.Tensor:
        if index == 1 and not ran:
            ran.append(index)
            run(chain, torch.ones(5, 8, requires_grad=True))
        return hidden

    chain.between = between
    swap = install_chain(chain)
    run(chain, torch.ones(5, 8, requires_grad=True))
    assert swap.stats().offloaded_bytes > 0


def test_a_forward_that_saves_nothing_is_no_reason_to_warn() -> None:
    model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    swap = registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=tokens(model), use_cache=False)
    assert swap.stats().offloaded_bytes == 0
    assert not swap.stats().kept_bytes
