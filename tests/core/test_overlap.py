# SPDX-License-Identifier: Apache-2.0
"""What the waits of compute say of the copies, and the window that a fraction needs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activation_swap import Overlap, Swap, SwapPolicy
from activation_swap.core.layer_chain import window_of
from activation_swap.core.swap_plan import spread
from tests.core.chain import Chain, equal, install_chain, run
from tests.core.happens_before import recording
from tests.core.recording_transfer import Operation
from tests.models import EVERYTHING

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

    assert (overlap.waits, overlap.waited_ms, overlap.fraction) == (0, 0.0, 1.0)


def test_the_part_of_the_time_that_compute_did_not_wait_is_what_hides() -> None:
    # Layers of 3 ms, each followed by 1 ms of waiting.
    overlap = overlap_of(("d2h", 3, 4), ("d2h", 7, 8), ("d2h", 11, 12))

    assert (overlap.waits, overlap.waited_ms, overlap.fraction) == (3, 3.0, 0.75)
    assert repr(overlap) == "Overlap(waits=3, waited_ms=3.0, fraction=0.75)"


def test_the_worse_direction_decides() -> None:
    overlap = overlap_of(
        *(("d2h", at, at) for at in (0, 4, 8)),
        *(("h2d", at, at + 1) for at in (20, 23, 26)),
    )

    assert overlap.fraction == 0.67


def test_work_between_passes_does_not_count() -> None:
    """The bubble of a pipeline, a loss, the next step: far longer than a layer, and not one."""
    passes = [start + layer for start in (0, 1000, 5000) for layer in (0, 4, 8, 12)]
    overlap = overlap_of(*(("d2h", at, at + 2) for at in passes))

    assert overlap.fraction == 0.5


def test_waits_of_two_devices_come_in_turn() -> None:
    pairs = [((f"d2h:{device}", at, at + 1)) for at in (0, 2, 4, 6) for device in (0, 1)]

    assert overlap_of(*pairs).fraction == 0.5


def test_a_wait_that_is_hardly_one_hides() -> None:
    """Two events are never at the same time, and 0.999 of the layers would be one less."""
    assert overlap_of(*(("d2h", at, at + 0.005) for at in range(10))).fraction == 1.0


def test_no_time_between_waits_is_the_smallest_fraction() -> None:
    """A policy takes every fraction that comes out."""
    overlap = overlap_of(*(("d2h", at, at + 1) for at in range(4)))

    assert overlap.fraction == 0.01
    assert overlap_of(*(("d2h", 3, 3) for _ in range(4)), ("d2h", 8, 8)).fraction == 1.0


def test_waits_of_two_streams_are_not_compared() -> None:
    overlap = overlap_of(("d2h", 0, 1))
    overlap.add("d2h", stream="another", before=At(5), after=At(9))

    assert (overlap.waited_ms, overlap.fraction) == (5.0, 1.0)


def test_reading_waits_for_the_device() -> None:
    overlap, last = overlap_of(("d2h", 0, 1)), At(4)
    overlap.add("d2h", stream="compute", before=At(3), after=last)
    assert not last.asked

    assert overlap.fraction == 0.67
    assert last.asked


def test_blocks_measure_on_their_own_whichever_ends_first() -> None:
    links = recording(EVERYTHING).links
    swap = Swap(install_chain(Chain(layers=3), links=links))
    early = links.of(torch.device("cpu")).transfer
    first, second = swap.measure_overlap(), swap.measure_overlap()
    one, other = first.__enter__(), second.__enter__()
    # Another device, first computed on while somebody measures.
    late = links.of(torch.device("meta")).transfer
    assert early.overlaps == late.overlaps == [one, other]
    first.__exit__(None, None, None)
    assert early.overlaps == late.overlaps == [other]
    second.__exit__(None, None, None)
    assert early.overlaps == late.overlaps == []


def test_an_error_in_the_block_ends_the_measuring() -> None:
    installation = install_chain(Chain(layers=3))
    with pytest.raises(KeyError), Swap(installation).measure_overlap():
        raise KeyError
    assert installation.overlaps == []


def test_on_a_cpu_and_on_an_inactive_swap_nothing_is_seen() -> None:
    model = Chain(layers=3)
    installation = install_chain(model)
    for swap in (Swap(installation), Swap()):
        with swap.measure_overlap() as overlap:
            run(model, torch.randn(4, 8, requires_grad=True))
        assert overlap.waits == 0


@pytest.mark.parametrize(
    ("fraction", "window"), [(1.0, 1), (0.5, 1), (1 / 3, 1), (0.25, 1), (0.7, 2), (0.4, 2)]
)
def test_window(fraction: float, window: int) -> None:
    assert window_of(fraction) == window


def waits(moved: list[int], *, copy: float, window: int, layers: int = 0) -> list[float]:
    """Replay a pass whose layers take 1: return how long compute waits for each group's copy.

    Args:
        moved: The attentions that move, in the order of the pass.
        copy: How long the copies of one take.
        window: How many may be copied when the next one ends.
        layers: Where the last join is, if it is to be replayed.
    """
    now = link = 0.0
    ends: list[float] = []
    found = []
    for before, index in pairwise([-1, *moved]):
        now += index - before
        link = max(link, now) + copy
        ends.append(link)
        if len(ends) > window:
            found.append(max(0.0, ends[-1 - window] - now))
            now += found[-1]
    if layers:
        now += layers - 1 - moved[-1]
        found.append(max(0.0, link - now))
    return found


def reload_waits(layers: int, moved: list[int], *, copy: float, ahead: int) -> list[float]:
    """Replay the backward of the same: from the last attention, which stayed, to the first."""
    now = link = 0.0
    ends: list[float] = []
    found = []
    order = moved[::-1]
    for position, (before, index) in enumerate(pairwise([layers - 1, layers - 1, *order])):
        now += before - index
        if position:
            found.append(max(0.0, ends[position - 1] - now))
            now += found[-1]
        while len(ends) < min(position + ahead, len(order)):
            link = max(link, now) + copy
            ends.append(link)
    return found


@given(
    layers=st.integers(2, 96),
    fraction=st.fractions("1/100", 1, max_denominator=1000).map(float),
)
def test_copies_as_long_as_the_gaps_are_on_average_make_compute_wait_at_the_end_alone(
    layers: int, fraction: float
) -> None:
    # The last attention stays on the device, and its end gives up what is still copied.
    moved = sorted(spread([0] * layers, fraction))[:-1]
    if not moved:
        return
    window = window_of(fraction)
    *within, end = waits(moved, copy=1 / fraction, window=window, layers=layers)
    assert max(within, default=0.0) == pytest.approx(0.0, abs=1e-6)
    assert end <= window / fraction + 1e-6
    # In backward the first reload has the time of one layer alone.
    assert sum(reload_waits(layers, moved, copy=1 / fraction, ahead=window)) <= 1 / fraction + 1e-6


def test_one_group_in_flight_would_not_do() -> None:
    moved = sorted(spread([0] * 48, 0.7))[:-1]
    assert window_of(0.7) == 2
    assert sum(waits(moved, copy=1 / 0.7, window=1)) > 5.0
    assert sum(waits(moved, copy=1 / 0.7, window=2)) == pytest.approx(0.0, abs=1e-6)
    assert sum(reload_waits(48, moved, copy=1 / 0.7, ahead=1)) > 5.0
    assert sum(reload_waits(48, moved, copy=1 / 0.7, ahead=2)) < 1.0


@pytest.mark.parametrize(("fraction", "ahead"), [(1.0, 1), (0.7, 2)])
def test_as_many_groups_are_reloaded_ahead(fraction: float, ahead: int) -> None:
    chain = Chain(layers=8)
    policy = SwapPolicy(min_bytes=1, slab_bytes=4096, fraction=fraction)
    tape = recording(policy)
    install_chain(chain, policy=policy, links=tape.links)
    loss = chain(torch.randn(4, 8, requires_grad=True))
    torch.autograd.grad(loss, list(chain.attentions[-1].parameters()))
    assert tape.count(Operation.RELOAD) == ahead


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
