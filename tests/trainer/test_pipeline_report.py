# SPDX-License-Identifier: Apache-2.0
"""The verdict over all ranks of a pipeline and its table, from made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from activation_swap.trainer.pipeline_compare import PipelineReport, RankReport
from activation_swap.trainer.rendering import rank_table

pytestmark = pytest.mark.unit

FIRST = RankReport(
    rank=0,
    stages=(0, 3),
    losses_equal=True,
    losses_finite=True,
    gradients_equal=True,
    baseline_repeats=None,
    gradients=5,
    offloaded_bytes=3 << 20,
    reloaded_bytes=3 << 20,
    reload_misses=0,
    late_releases=0,
    waited_seconds=0.0125,
    hiding_fraction=0.834,
    resident_saved_bytes_peak=1 << 20,
    host_bytes_reserved=8 << 20,
    step_seconds={"none": 0.5, "attention": 0.75},
    peak_device_bytes={"none": None, "attention": None},
    device="cpu",
)
# The last rank of a pipeline may have nothing to move.
LAST = replace(
    FIRST,
    rank=1,
    stages=(1, 2),
    offloaded_bytes=0,
    reloaded_bytes=0,
    waited_seconds=None,
    hiding_fraction=None,
)


def report(*ranks: RankReport) -> PipelineReport:
    return PipelineReport.of(ranks, config={})


def test_equal_bits_pass_where_any_rank_moved_bytes() -> None:
    made = report(FIRST, LAST)
    assert (made.losses_equal, made.gradients_equal, made.baseline_repeats) == (True, True, None)
    assert (made.offloaded_bytes, made.passed) == (3 << 20, True)


def test_a_loss_that_is_no_finite_number_fails() -> None:
    made = report(FIRST, replace(LAST, losses_finite=False))
    assert (made.losses_equal, made.losses_finite, made.passed) == (True, False, False)


def test_equal_bits_tell_nothing_where_no_rank_moved_any() -> None:
    made = report(replace(FIRST, offloaded_bytes=0), LAST)
    assert (made.losses_equal, made.gradients_equal, made.passed) == (True, True, False)


@pytest.mark.parametrize(
    "differing", [replace(LAST, losses_equal=False), replace(LAST, gradients_equal=False)]
)
@pytest.mark.parametrize(("repeats", "passed"), [(None, False), (True, False), (False, True)])
def test_a_difference_on_any_rank_counts_where_the_baseline_repeats(
    differing: RankReport,
    repeats: bool | None,  # noqa: FBT001
    passed: bool,  # noqa: FBT001
) -> None:
    asked = None if repeats is None else True
    first = replace(FIRST, baseline_repeats=asked)
    made = report(first, replace(differing, baseline_repeats=repeats))
    assert (made.baseline_repeats, made.passed) == (repeats, passed)


def test_table_tells_the_overlap_where_a_device_measured_it() -> None:
    table = rank_table((FIRST, LAST))
    assert table["stages"] == ["0, 3", "1, 2"]
    assert table["offloaded"] == ["3.00 MiB", "0 B"]
    assert table["waited per step"] == ["12.5 ms", "-"]
    assert table["hiding fraction"] == ["0.83", "-"]
    assert table["s per step"] == ["0.500 > 0.750"] * 2
