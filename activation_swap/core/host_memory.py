# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may still take, from the limits that somebody set."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["host_headroom"]

_RESERVE = 0.05
"""Part of a limit that is left to everything else in its group: pinned memory cannot be swapped."""

_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes the largest number of whole pages where nothing is limited."""


def host_headroom(*, root: Path = Path("/")) -> int | None:
    """Return the bytes left under the tightest of the cgroup's and the process's limits.

    Only explicit limits count. The amount of free memory does not: a virtual machine's memory may
    grow as it is used, and reclaimable caches make it a poor bound.

    Args:
        root: Where ``proc`` and ``sys`` are; tests pass a directory of their own.

    Returns:
        Bytes, at least 0, or ``None`` where nothing is limited.
    """
    rooms = [room for room in (*_cgroup_rooms(root), _address_space_room(root)) if room is not None]
    return max(0, min(rooms)) if rooms else None


def _cgroup_rooms(root: Path) -> list[int | None]:
    rooms: list[int | None] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        relative = group.lstrip("/")
        if hierarchy == "0":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A limit of any ancestor holds, too. Inside a container the path may not exist: the
        # container's own group is then the mount point itself.
        for path in (base / relative, *(base / relative).parents):
            rooms.append(_group_room(path, limit, usage))
            if path == base:
                break
    return rooms


def _group_room(path: Path, limit: str, usage: str) -> int | None:
    allowed, used = _number(path / limit), _number(path / usage)
    if allowed is None or used is None or allowed >= _NO_LIMIT:
        return None
    statistics = dict(
        line.split(" ", 1) for line in _read(path / "memory.stat").splitlines() if " " in line
    )
    # File pages that nobody has used lately are dropped before anything is refused.
    reclaimable = int(statistics.get("inactive_file", "0"))
    return int(allowed * (1 - _RESERVE)) - used + reclaimable


def _address_space_room(root: Path) -> int | None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return None
    pages = _read(root / "proc/self/statm").split(" ", 1)[0]
    used = int(pages) * resource.getpagesize() if pages else 0
    return int(allowed * (1 - _RESERVE)) - used


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
