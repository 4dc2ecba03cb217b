# SPDX-License-Identifier: Apache-2.0
"""Host memory: cut to the byte, bounded, never in two hands, refused rather than exceeded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activation_swap.core.pinned_pool import ALIGNMENT, HostBlock, PinnedPool, aligned
from activation_swap.core.transfer import Fence, merge_fences

pytestmark = pytest.mark.unit

SLAB = 4096


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def pool_of(
    *, allowed: int | None = None, slab_bytes: int = SLAB, fail_from: int | None = None
) -> PinnedPool:
    """Return a pool; its slab number ``fail_from``, counted from 0, cannot be had."""
    made: list[torch.Tensor] = []

    def make(nbytes: int) -> torch.Tensor:
        if len(made) == fail_from:
            message = "out of pinned memory"
            raise RuntimeError(message)
        made.append(allocate(nbytes))
        return made[-1]

    def headroom() -> int | None:
        return None if allowed is None else allowed - pool.reserved_bytes

    pool = PinnedPool(make, slab_bytes=slab_bytes, headroom=headroom)
    return pool


def cut(block: HostBlock, start: int, nbytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    (pieces,) = block.tensors(((start, nbytes, dtype, (nbytes // dtype.itemsize,), (1,)),))
    return pieces


def write(block: HostBlock, value: int) -> None:
    for piece in cut(block, 0, block.nbytes, torch.uint8):
        piece.fill_(value)


def holds(block: HostBlock, value: int) -> bool:
    pieces = cut(block, 0, block.nbytes, torch.uint8)
    return sum(p.numel() for p in pieces) == block.nbytes and all(
        bool((piece == value).all()) for piece in pieces
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 5 * SLAB)),
            st.tuples(st.just("drop"), st.integers(0, 100)),
        ),
        max_size=60,
    )
)
def test_bytes_have_one_owner_and_memory_is_bounded(actions: list[tuple[str, int]]) -> None:
    """Reserved is the most that was ever out, rounded up to a slab; no order fragments it."""
    pool = pool_of()
    out: dict[int, HostBlock] = {}
    most = 0
    for number, (action, value) in enumerate(actions):
        if action == "take":
            block = pool.allocate(aligned(value))
            assert block is not None
            write(block, number % 251)
            out[number] = block
            del block
        elif out:
            del out[list(out)[value % len(out)]]
        in_use = sum(block.nbytes for block in out.values())
        most = max(most, in_use)
        assert pool.bytes_in_use == in_use
        assert pool.reserved_bytes <= most + SLAB - ALIGNMENT + aligned(1)
        assert all(holds(block, owner % 251) for owner, block in out.items())
    out.clear()
    assert pool.bytes_in_use == 0


def test_a_block_may_lie_over_several_slabs() -> None:
    pool = pool_of()
    first = pool.allocate(3 * ALIGNMENT)
    block = pool.allocate(2 * SLAB)
    assert first is not None
    assert block is not None
    assert pool.reserved_bytes == 3 * SLAB
    pieces = cut(block, 0, block.nbytes, torch.float32)
    assert [piece.dtype for piece in pieces] == [torch.float32] * 3
    (whole,) = block.tensors(((0, 64, torch.float32, (2, 8), (1, 2)),))[0]
    assert whole.dtype is torch.float32
    assert whole.size() == (2, 8)
    assert whole.stride() == (1, 2)


def test_reused_bytes_carry_the_fences_of_their_last_copies() -> None:
    pool = pool_of()
    blocks = [pool.allocate(SLAB // 2) for _ in range(2)]
    for number, block in enumerate(blocks):
        assert block is not None
        block.fences = (Fence("d2h", number, None), Fence("h2d", 7 - number, None))
    del block
    blocks.clear()
    again = pool.allocate(SLAB)
    assert again is not None
    assert sorted(map(repr, again.fences)) == ["Fence(d2h#1)", "Fence(h2d#7)"]
    fresh = pool.allocate(SLAB)
    assert fresh is not None
    assert fresh.fences == ()


def test_latest_fence_of_a_lane_implies_the_earlier() -> None:
    early, late, other = Fence("d2h", 1, None), Fence("d2h", 2, None), Fence("h2d", 1, None)
    assert merge_fences((early,), ()) == (early,)
    assert merge_fences((), (early,)) == (early,)
    assert set(merge_fences((late, other), (early,))) == {late, other}
    assert set(merge_fences((early,), (late, other))) == {late, other}


@pytest.mark.parametrize("fail_from", [0, 1, 2])
def test_a_refused_slab_leaves_the_pool_usable(fail_from: int) -> None:
    pool = pool_of(fail_from=fail_from)
    assert pool.allocate(3 * SLAB) is None
    assert pool.failure == f"{3 * SLAB} bytes asked for: out of pinned memory"
    assert pool.reserved_bytes == fail_from * SLAB
    assert pool.bytes_in_use == 0
    usable = pool.allocate(fail_from * SLAB)
    assert usable is not None
    assert pool.bytes_in_use == fail_from * SLAB


def test_the_system_is_asked_once() -> None:
    asked = []

    def make(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        message = "no"
        raise RuntimeError(message)

    pool = PinnedPool(make, slab_bytes=SLAB, headroom=lambda: None)
    assert [pool.allocate(SLAB) for _ in range(5)] == [None] * 5
    assert asked == [SLAB]


@pytest.mark.parametrize(("allowed", "fits"), [(2 * SLAB, True), (2 * SLAB - 1, False), (0, False)])
def test_a_ceiling_is_respected(allowed: int, *, fits: bool) -> None:
    pool = pool_of(allowed=allowed)
    block = pool.allocate(SLAB + 1)
    assert (block is not None) is fits
    assert pool.reserved_bytes <= allowed
    if not fits:
        assert pool.failure == f"{2 * SLAB} bytes asked for, {allowed} allowed"


def test_a_ceiling_refuses_what_is_too_large_and_no_more() -> None:
    pool = pool_of(allowed=3 * SLAB)
    assert pool.allocate(4 * SLAB) is None
    one = pool.allocate(SLAB)
    assert one is not None
    assert pool.allocate(3 * SLAB) is None
    two = pool.allocate(2 * SLAB)
    assert two is not None
    assert pool.allocate(1) is None
    del one, two
    assert pool.allocate(3 * SLAB) is not None


def test_a_ceiling_is_not_asked_twice_for_as_much() -> None:
    asked = []

    def headroom() -> int:
        asked.append(True)
        return SLAB

    pool = PinnedPool(allocate, slab_bytes=SLAB, headroom=headroom)
    assert [pool.allocate(n * SLAB) for n in (3, 3, 4, 2, 3)] == [None] * 5
    assert len(asked) == 2


def test_after_a_failed_allocation_nothing_is_asked_for() -> None:
    pool = pool_of(fail_from=0)
    assert pool.allocate(3 * SLAB) is None
    pool._allocate_slab = allocate
    assert pool.allocate(1) is None


def test_closing_gives_everything_up_but_what_is_out() -> None:
    pool = pool_of()
    block = pool.allocate(SLAB)
    assert block is not None
    write(block, 9)
    pool.close()
    assert pool.reserved_bytes == pool.bytes_in_use == 0
    assert holds(block, 9)
    assert pool.allocate(1) is None
    assert pool.failure == "the swap was removed"
    del block
    assert pool.bytes_in_use == 0


def test_closed_pool_keeps_no_slab_alive() -> None:
    import gc
    import weakref

    slabs: list[weakref.ref[torch.UntypedStorage]] = []

    def make(nbytes: int) -> torch.Tensor:
        slab = allocate(nbytes)
        slabs.append(weakref.ref(slab.untyped_storage()))
        return slab

    pool = PinnedPool(make, slab_bytes=SLAB, headroom=lambda: None)
    block = pool.allocate(SLAB)
    assert block is not None
    write(block, 1)
    pool.close()
    write(block, 2)
    del block
    gc.collect()
    assert [slab() for slab in slabs] == [None]


def test_an_empty_block_is_free() -> None:
    pool = pool_of(allowed=0)
    block = pool.allocate(0)
    assert block is not None
    assert pool.reserved_bytes == 0
