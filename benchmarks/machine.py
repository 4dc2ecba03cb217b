# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was made: the facts that every table states."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from activation_swap.trainer.link_probe import probe_link

if TYPE_CHECKING:
    from activation_swap.trainer.link_probe import LinkRates

__all__ = ["describe", "facts"]


def facts(device: str) -> dict[str, Any]:
    """Return GPU, CPU, versions, date and the link's rates in bytes per second, all as of now."""
    rates = probe_link(device)
    if device != "cpu":
        torch.accelerator.empty_cache()
    return describe(device, rates)


def describe(device: str, rates: LinkRates | None) -> dict[str, Any]:
    """Return :func:`facts` with link rates that are known already."""
    accelerator = device != "cpu"
    gpu = torch.cuda.get_device_name() if accelerator and torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "cpu": _cpu(),
        "cpus": [len(os.sched_getaffinity(0)), os.cpu_count()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda if accelerator else None,
        "link_bytes_per_second": None if rates is None else asdict(rates),
    }


def _cpu() -> str:
    known = Path("/proc/cpuinfo")
    if known.exists():
        for line in known.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
