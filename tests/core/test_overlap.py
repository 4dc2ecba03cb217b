# SPDX-License-Identifier: Apache-2.0
"""What the waits of compute say of the copies, and the window that a fraction needs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activation_swap import Overlap, Swap, SwapPolicy
from activation_swap.core.layer_chain import window_of
from activation_swap.core.swap_plan import spread
from tests.core.chain import Chain, equal, install_chain, run
from tests.core.happens_before import recording
from tests.models import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.unit


@dataclass
class At:
    """An event that the device reached at a time."""

    ms: float
    asked: bool = False

    def synchronize(self) -> None:
        self.asked = True

    def elapsed_time(self, later: At) -> float:
        return later.ms - self.ms


def overlap_of(*waits: tuple[str, float, float], stream: str = "compute") -> Overlap:
    overlap = Overlap()
    for lane, before, after in waits:
        overlap.add(lane, stream=stream, before=At(before), after=At(after))
    return overlap


def test_nothing_seen_hides_everything() -> None:
    overlap = Overlap()

    assert overlap.fraction == 1.0
    assert overlap.compute_ms == overlap.waited_ms == 0.0


def test_the_part_of_the_time_that_compute_did_not_wait_is_what_hides() -> None:
    # Two layers of 3 ms, each followed by 1 ms of waiting.
    overlap = overlap_of(("d2h", 3, 4), ("d2h", 7, 8), ("d2h", 11, 12))

    assert (overlap.compute_ms, overlap.waited_ms) == (6, 2)
    assert overlap.fraction == 0.75
    assert repr(overlap) == "Overlap(compute_ms=6.0, waited_ms=2.0, fraction=0.75)"


def test_the_worse_direction_decides_and_what_lies_between_them_does_not_count() -> None:
    overlap = overlap_of(
        ("d2h", 0, 0), ("d2h", 4, 4), ("h2d", 900, 901), ("h2d", 903, 904), ("d2h", 999, 1000)
    )

    assert (overlap.compute_ms, overlap.waited_ms) == (6, 1)
    assert overlap.fraction == pytest.approx(2 / 3)


def test_waits_of_two_streams_are_not_compared() -> None:
    overlap = overlap_of(("d2h", 0, 1))
    overlap.add("d2h", stream="another", before=At(5), after=At(9))

    assert overlap.compute_ms == overlap.waited_ms == 0


def test_reading_waits_for_the_device() -> None:
    overlap, last = overlap_of(("d2h", 0, 1)), At(4)
    overlap.add("d2h", stream="compute", before=At(3), after=last)
    assert not last.asked

    assert overlap.fraction == pytest.approx(2 / 3)
    assert last.asked


def test_the_innermost_block_measures_and_only_inside_of_it() -> None:
    links = recording(EVERYTHING).links
    installation = install_chain(Chain(layers=3), links=links)
    early = links.of(torch.device("cpu"))
    with Swap(installation).measure_overlap() as outer:
        assert early.transfer.overlap is outer
        with Swap(installation).measure_overlap() as inner:
            # Another device, first computed on while somebody measures.
            late = links.of(torch.device("meta"))
            assert early.transfer.overlap is late.transfer.overlap is inner
        assert early.transfer.overlap is late.transfer.overlap is outer
    assert early.transfer.overlap is late.transfer.overlap is None


def test_an_error_in_the_block_ends_the_measuring() -> None:
    installation = install_chain(Chain(layers=3))
    with pytest.raises(KeyError), Swap(installation).measure_overlap():
        raise KeyError
    assert installation.overlap is None


def test_on_a_cpu_and_on_an_inactive_swap_nothing_is_seen() -> None:
    model = Chain(layers=3)
    installation = install_chain(model)
    for swap in (Swap(installation), Swap()):
        with swap.measure_overlap() as overlap:
            run(model, torch.randn(4, 8, requires_grad=True))
        assert overlap.fraction == 1.0


@pytest.mark.parametrize(
    ("fraction", "window"), [(1.0, 1), (0.5, 1), (1 / 3, 1), (0.25, 1), (0.7, 2), (0.4, 2)]
)
def test_window(fraction: float, window: int) -> None:
    assert window_of(fraction) == window


def waits(recorded: list[int], *, copy: float, window: int) -> Iterator[float]:
    """Replay a forward whose layers take 1: yield how long compute waits after each attention."""
    now = link = 0.0
    copied: list[float] = []
    for before, index in pairwise([-1, *recorded]):
        now += index - before
        link = max(link, now) + copy
        copied.append(link)
        if len(copied) > window:
            waited = max(0.0, copied[-1 - window] - now)
            now += waited
            yield waited


@given(
    layers=st.integers(2, 96),
    fraction=st.fractions("1/100", 1, max_denominator=1000).map(float),
)
def test_copies_as_long_as_the_gaps_are_on_average_never_make_compute_wait(
    layers: int, fraction: float
) -> None:
    # The last attention stays on the device.
    recorded = sorted(spread([0] * layers, fraction))
    moved = recorded[:-1]
    found = waits(moved, copy=1 / fraction, window=window_of(fraction))
    assert max(found, default=0.0) == pytest.approx(0.0, abs=1e-6)


def test_one_group_in_flight_would_not_do() -> None:
    recorded = sorted(spread([0] * 48, 0.7))
    assert window_of(0.7) == 2
    assert max(waits(recorded[:-1], copy=1 / 0.7, window=1)) > 0.1


def test_two_groups_in_flight_keep_the_bits() -> None:
    plain, model = Chain(layers=6), Chain(layers=6)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    policy = SwapPolicy(min_bytes=1, slab_bytes=4096, fraction=0.7)
    swap = install_chain(model, policy=policy)
    assert window_of(policy.fraction) == 2
    assert equal(run(model, hidden), run(plain, hidden))
    assert swap.stats().offloaded_bytes == swap.stats().reloaded_bytes > 0
    assert swap.stats().late_releases == swap.stats().reload_misses == 0
    assert swap.stats().live_groups == 0
