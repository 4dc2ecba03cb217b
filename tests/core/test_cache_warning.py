"""A key-value cache in a training forward holds what was moved: one warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch

from activation_swap import SwapPolicy, registry
from tests.models import build, gradients, tokens

pytestmark = pytest.mark.level0


def test_use_cache_is_named_once_and_changes_no_bit() -> None:
    plain, model = build(), build()
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))
    ids = tokens(model)
    plain(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    with pytest.warns(RuntimeWarning, match="use_cache=False"):
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
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
