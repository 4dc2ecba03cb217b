# SPDX-License-Identifier: Apache-2.0
"""The Python cost of the hooks, as a number of calls: a clock would depend on the machine."""

from __future__ import annotations

from typing import Final

import pytest

pytestmark = pytest.mark.level0

CALLS_PER_ATTENTION: Final = 590
"""Of Python and C functions, forward and backward together. Lower it when the path gets shorter."""

STORAGES_PER_ATTENTION: Final = 9
"""What one attention of this model saves, see the table in the design."""


def test_one_attention_costs_few_calls() -> None:
    from benchmarks.hooks import calls_per_attention

    assert 0 < calls_per_attention() <= CALLS_PER_ATTENTION


def test_the_counted_work_is_that_of_a_real_attention() -> None:
    from benchmarks.hooks import AttentionChain

    chain = AttentionChain(3, swapped=True)
    chain()
    assert chain.offloaded_storages() == 2 * STORAGES_PER_ATTENTION, "all but the last attention"


def test_calls_are_counted_in_python_and_in_c() -> None:
    from benchmarks.hooks import count_calls

    nothing = count_calls(lambda: None)
    assert count_calls(lambda: len([abs(-1)])) == nothing + 2
