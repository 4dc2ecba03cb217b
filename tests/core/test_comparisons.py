# SPDX-License-Identifier: Apache-2.0
"""The comparisons that every test relies on see one bit."""

from __future__ import annotations

import pytest
import torch

from tests.core.chain import equal
from tests.models import Step, difference

pytestmark = pytest.mark.unit

ZERO = torch.zeros(2)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (ZERO.clone(), True),
        (-ZERO, False),
        (ZERO.double(), False),
        (ZERO[None], False),
        (ZERO + 1e-45, False),
    ],
    ids=["itself", "negative zero", "another type", "another shape", "one bit"],
)
def test_what_is_equal(other: torch.Tensor, *, same: bool) -> None:
    assert equal({"a": ZERO}, {"a": other}) is same
    assert (difference(Step(ZERO), Step(other)) is None) is same
    assert (difference(Step(ZERO, {"a": ZERO}), Step(ZERO, {"a": other})) is None) is same


def test_a_nan_is_no_result() -> None:
    broken = torch.full((1,), torch.nan)
    assert difference(Step(broken), Step(broken)) is not None
