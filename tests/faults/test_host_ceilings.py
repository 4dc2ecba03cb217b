# SPDX-License-Identifier: Apache-2.0
"""How much host memory may be taken: a ceiling of the policy, the process, the cgroup."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from activation_swap import KeepReason, SwapPolicy
from activation_swap.core.host_memory import host_headroom
from activation_swap.core.link import Links
from tests.faults.harness import at_base
from tests.models import build, difference, forward, install, step, tokens, twins

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]

SLAB = 16 * 1024


@pytest.mark.parametrize("slabs", range(7))
def test_a_ceiling_of_the_policy(slabs: int) -> None:
    """Any ceiling: what fits moves, the rest stays, never a byte more."""
    plain, model = twins(attention="sdpa")
    policy = SwapPolicy(min_bytes=1, slab_bytes=SLAB, max_host_bytes=slabs * SLAB)
    swap = install(model, policy)
    expected = step(plain, tokens(plain))
    if slabs < 5:
        with pytest.warns(RuntimeWarning, match=r"\d+ allowed"):
            found = step(model, tokens(model))
    else:
        found = step(model, tokens(model))
    assert difference(found, expected) is None
    stats = swap.stats()
    assert stats.host_bytes_reserved <= slabs * SLAB
    # A group needs 37,376 bytes: one fits into three slabs, two into five.
    groups = 2 if slabs >= 5 else 1 if slabs >= 3 else 0
    assert (KeepReason.HOST_MEMORY in stats.kept_bytes) is (groups < 2)
    assert stats.saved_bytes == groups * stats.kept_bytes[KeepReason.LAST]
    assert at_base(swap)


def test_a_ceiling_of_the_cgroup(tmp_path: Path) -> None:
    """The group's limit less a reserve, read from its files at each growth."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n", "ascii")
    (group / "memory.max").write_text("1000000", "ascii")
    (group / "memory.current").write_text("900000", "ascii")
    model, plain = build(), build()
    policy = SwapPolicy(min_bytes=1, slab_bytes=SLAB)
    links = Links(policy, system_headroom=lambda: host_headroom(root=tmp_path))
    swap = install(model, policy, links=links)
    with pytest.warns(RuntimeWarning, match="bytes asked for, 50000 allowed"):
        found = step(model, tokens(model, length=20))
    assert difference(found, step(plain, tokens(plain, length=20))) is None
    assert swap.stats().host_bytes_reserved <= 50_000


LIMITED = """
import resource, sys, warnings
import torch
from tests.models import build, difference, install, step, tokens
from activation_swap import KeepReason, SwapPolicy

torch.set_num_threads(1)
plain, model = build(), build()
expected = step(plain, tokens(plain))
step(model, tokens(model))
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
limit = used + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
swap = install(model, SwapPolicy(min_bytes=1, slab_bytes=1 << 30))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    found = step(model, tokens(model))
assert difference(found, expected) is None
assert swap.stats().kept_bytes[KeepReason.HOST_MEMORY] > 0
assert swap.stats().host_bytes_reserved == 0
messages = [str(w.message) for w in seen]
assert sum("pinned host memory" in message for message in messages) == 1, messages
print(*messages)
"""


def test_a_limit_of_the_process() -> None:
    """RLIMIT_AS is seen before anything is asked for, so that nothing else fails either."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1073741824 bytes asked for" in done.stdout
    assert "allowed" in done.stdout


def test_the_pool_shrinks_on_remove() -> None:
    """To nothing, or to what a graph that is alive still needs."""
    plain, model = twins()
    expected = step(plain, tokens(plain))
    swap = install(model, SwapPolicy(min_bytes=1, slab_bytes=SLAB))
    step(model, tokens(model))
    assert swap.stats().host_bytes_reserved > 0
    model.zero_grad(set_to_none=True)
    loss: Any = forward(model, tokens(model)).loss
    swap.remove()
    assert swap.stats().host_bytes_reserved == 0
    loss.backward()
    found: Any = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(bool((found[n] == g).all()) for n, g in expected.gradients.items())
