# SPDX-License-Identifier: Apache-2.0
"""What the limits of cgroups and of the process leave, read from a file system of our own."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from activation_swap.core.host_memory import host_headroom

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_process_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


def group(path: str, *, limit: str, used: int, inactive: int | None = None) -> dict[str, str]:
    files = {f"{path}/memory.max": f"{limit}\n", f"{path}/memory.current": f"{used}\n"}
    if inactive is not None:
        files[f"{path}/memory.stat"] = f"anon 5\ninactive_file {inactive}\n"
    return files


V2 = {"proc/self/cgroup": "0::/jobs/one\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/jobs\n4:memory:/jobs/one\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (V2, None),
        (V2 | group("sys/fs/cgroup/jobs/one", limit="max", used=5), None),
        (
            V2 | group("sys/fs/cgroup/jobs/one", limit=str(100 * GIB), used=40 * GIB),
            55 * GIB,
        ),
        (
            V2 | group("sys/fs/cgroup/jobs/one", limit=str(100 * GIB), used=40 * GIB, inactive=GIB),
            56 * GIB,
        ),
        (
            V2
            | group("sys/fs/cgroup/jobs/one", limit=str(100 * GIB), used=40 * GIB)
            | group("sys/fs/cgroup/jobs", limit=str(60 * GIB), used=50 * GIB),
            7 * GIB,
        ),
        # In a container the group's own path is not mounted: its files are at the root.
        (V2 | group("sys/fs/cgroup", limit=str(20 * GIB), used=GIB), 18 * GIB),
        (V2 | group("sys/fs/cgroup", limit=str(GIB), used=GIB), 0),
        (
            V1
            | {
                "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": str(20 * GIB),
                "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": str(2 * GIB),
            },
            17 * GIB,
        ),
    ],
    ids=[
        "nothing",
        "no-files",
        "unlimited",
        "limited",
        "with-cache",
        "tighter-parent",
        "container",
        "full",
        "version-1",
    ],
)
def test_headroom(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert host_headroom(root=write(tmp_path, files)) == expected


def test_an_unlimited_version_1_group_allows_much(tmp_path: Path) -> None:
    """Version 1 says 2**63 less a page where nothing is limited."""
    files = V1 | {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    found = host_headroom(root=write(tmp_path, files))
    assert found is None or found > 1 << 50


def test_process_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10 * GIB, resource.RLIM_INFINITY))
    pages = 2 * GIB // resource.getpagesize()
    root = write(tmp_path, {"proc/self/statm": f"{pages} 1 1 1 0 1 0\n"})
    assert host_headroom(root=root) == int(9.5 * GIB) - 2 * GIB


def test_real_limits_can_be_read() -> None:
    found = host_headroom()
    assert found is None or found >= 0
