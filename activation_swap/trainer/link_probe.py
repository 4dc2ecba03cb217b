# SPDX-License-Identifier: Apache-2.0
"""How fast the link between device and host memory is: a probe of its own, beside the training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from activation_swap.trainer.device import resolve_device, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LinkRates", "probe_link"]

_COPY_BYTES = 256 * 1024 * 1024
_REPEATS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bytes per second between pinned host memory and the device.

    Attributes:
        d2h: Device to host, alone.
        h2d: Host to device, alone.
        d2h_both: Device to host, while host to device runs too.
        h2d_both: Host to device, while device to host runs too.
    """

    d2h: float
    h2d: float
    d2h_both: float
    h2d_both: float


def probe_link(device_name: str, *, meet: Callable[[], object] | None = None) -> LinkRates | None:
    """Copy a few GiB each way.

    Args:
        device_name: As in :func:`resolve_device`.
        meet: Called before each rate is taken. Processes that copy at the same time meet there.

    Returns:
        The rates, or ``None`` on a CPU, which has no link.
    """
    device = resolve_device(device_name)
    if device.type == "cpu":
        return None
    streams = torch.get_device_module(device)
    out, back = (streams.Stream(device) for _ in range(2))
    on_device = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [
        torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
    ]

    def d2h() -> None:
        with streams.stream(out):
            on_host[0].copy_(on_device[0], non_blocking=True)

    def h2d() -> None:
        with streams.stream(back):
            on_device[1].copy_(on_host[1], non_blocking=True)

    def both() -> None:
        d2h()
        h2d()

    together = _rate(both, device, meet)
    return LinkRates(
        d2h=_rate(d2h, device, meet),
        h2d=_rate(h2d, device, meet),
        d2h_both=together,
        h2d_both=together,
    )


def _rate(
    launch: Callable[[], None], device: torch.device, meet: Callable[[], object] | None
) -> float:
    launch()
    synchronize(device)
    if meet is not None:
        meet()
    start = time.perf_counter()
    for _ in range(_REPEATS):
        launch()
    synchronize(device)
    return _COPY_BYTES * _REPEATS / (time.perf_counter() - start)
