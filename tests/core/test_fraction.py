# SPDX-License-Identifier: Apache-2.0
"""``SwapPolicy.fraction``: fewer attentions move, evenly spread, and the numbers stay the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from activation_swap import SwapPolicy
from activation_swap._site import Site
from activation_swap.core.swap_plan import SwapPlan
from tests.core.chain import Chain, equal, install_chain, run

pytestmark = pytest.mark.unit


def plan_of(num_sites: int, fraction: float, *, stages: int = 1) -> SwapPlan:
    sites = tuple(
        Site(fqn=f"layers.{order}", module=nn.Identity(), stage=order * stages // num_sites)
        for order in range(num_sites)
    )
    return SwapPlan(sites=sites, policy=SwapPolicy(fraction=fraction))


@pytest.mark.parametrize(
    ("num_sites", "fraction", "expected"),
    [
        (4, 1.0, {0, 1, 2, 3}),
        (4, 0.5, {1, 3}),
        (6, 1 / 3, {2, 5}),
        (10, 0.1, {9}),
        (5, 0.5, {0, 2, 4}),
        (3, 0.01, {2}),
    ],
)
def test_sites_are_spread_evenly_and_the_last_is_recorded(
    num_sites: int, fraction: float, expected: set[int]
) -> None:
    assert plan_of(num_sites, fraction).recorded() == expected


def test_the_last_of_every_stage_is_recorded() -> None:
    assert plan_of(8, 0.25, stages=2).recorded() == {3, 7}


@pytest.mark.parametrize("num_sites", [6, 7, 8, 9, 12])
def test_every_second_of_each_stage_and_no_neighbours(num_sites: int) -> None:
    """Copies have the time of two layers in every stage, however many layers it has."""
    plan = plan_of(num_sites, 0.5, stages=2)
    for stage in (0, 1):
        recorded = [n for n in sorted(plan.recorded()) if plan.sites[n].stage == stage]
        assert {after - before for before, after in pairwise(recorded)} == {2}


def test_half_the_fraction_moves_half_the_bytes_bit_for_bit() -> None:
    plain, whole, half = Chain(layers=4), Chain(layers=4), Chain(layers=4)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    everything = install_chain(
        whole, policy=SwapPolicy(min_bytes=1, slab_bytes=4096, keep_last=False)
    )
    part = install_chain(
        half, policy=SwapPolicy(min_bytes=1, slab_bytes=4096, keep_last=False, fraction=0.5)
    )
    expected = run(plain, hidden)
    assert equal(run(whole, hidden), expected)
    assert equal(run(half, hidden), expected)
    assert part.stats().offloaded_bytes == everything.stats().offloaded_bytes // 2 > 0
    assert part.stats().reload_misses <= 1
