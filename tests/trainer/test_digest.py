# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: equal for equal bits, different for any other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activation_swap.trainer.digest import GradientDigest, combine

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digest() -> GradientDigest:
    return GradientDigest(CPU)


def of(digest: GradientDigest, tensor: torch.Tensor, name: str = "w") -> str:
    digest.observe(name, tensor)
    return combine(digest.finish())


@settings(deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_flipped_bit_is_seen(
    digest: GradientDigest, data: st.DataObject, dtype: torch.dtype
) -> None:
    tensor = torch.randn(data.draw(st.integers(1, 300)), generator=torch.Generator()).to(dtype)
    before = of(digest, tensor)
    assert of(digest, tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert of(digest, tensor) != before


def test_order_of_elements_is_seen(digest: GradientDigest) -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    assert of(digest, tensor) != of(digest, tensor.flip(0))
    assert of(digest, tensor.view(10, 100)) != of(digest, tensor.view(100, 10))


def test_negative_zero_is_not_zero(digest: GradientDigest) -> None:
    assert of(digest, torch.tensor([0.0])) != of(digest, torch.tensor([-0.0]))


def test_blocks_are_all_read(digest: GradientDigest) -> None:
    """Longer than two blocks, changed in the last."""
    tensor = torch.zeros((1 << 21) + 3)
    before = of(digest, tensor)
    tensor[-1] = 1.0
    assert of(digest, tensor) != before


def test_the_default_device_changes_nothing(digest: GradientDigest) -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    with torch.device("meta"):
        other = GradientDigest(CPU)
    assert of(other, tensor) == of(digest, tensor)


def test_name_and_type_are_part_of_it(digest: GradientDigest) -> None:
    tensor = torch.zeros(4)
    assert of(digest, tensor, "a") != of(digest, tensor, "b")
    assert of(digest, tensor) != of(digest, tensor.view(torch.int32))


def test_layout_is_not_part_of_it(digest: GradientDigest) -> None:
    tensor = torch.randn(6, 4)
    assert of(digest, tensor.t()) == of(digest, tensor.t().contiguous())


def test_order_of_observation_is_not_part_of_it(digest: GradientDigest) -> None:
    one, two = torch.zeros(2), torch.ones(2)
    digest.observe("one", one)
    digest.observe("two", two)
    forward = combine(digest.finish())
    digest.observe("two", two)
    digest.observe("one", one)
    assert combine(digest.finish()) == forward
