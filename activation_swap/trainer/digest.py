# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of gradients: equal bits give equal digests, computed where the gradient lies.

A cryptographic hash would have to bring every gradient to the CPU: 61 GB a step for the 30B model.
Instead each block of words is reduced on its device to one 64-bit number, the sum modulo 2**64 of
word times a fixed random odd weight. Integer sums do not depend on the order of the reduction. One
changed word always changes the sum, since an odd factor has an inverse modulo 2**64; other changes
go unnoticed once in about 2**64 cases. The numbers of a parameter are then hashed with its name,
type and shape.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GradientDigest", "combine"]

_BLOCK = 1 << 20
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientDigest:
    """Collects the gradients of one step. ``observe`` is an optimizer's observer."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), generator=generator, device="cpu")
        self._weights = (weights | 1).to(device)
        self._sums: list[tuple[str, torch.Tensor]] = []

    def observe(self, name: str, gradient: torch.Tensor) -> None:
        """Fingerprint one gradient, of a sharded one the part here, without waiting for it."""
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        flat = gradient.detach().contiguous().view(-1).view(_WORDS[gradient.element_size()])
        sums = [
            (block.long() * self._weights[: block.numel()]).sum()
            for block in torch.split(flat, _BLOCK)
        ]
        label = f"{name} {gradient.dtype} {tuple(gradient.shape)}"
        self._sums.append((label, torch.stack(sums)))

    def finish(self) -> dict[str, str]:
        """Return a hexadecimal digest per parameter, and start anew."""
        digests = {
            label: hashlib.sha256(f"{label} {sums.tolist()}".encode()).hexdigest()
            for label, sums in self._sums
        }
        self._sums.clear()
        return digests


def combine(digests: Mapping[str, str]) -> str:
    """Return one hexadecimal digest of all parameters, in whatever order they came."""
    lines = "\n".join(f"{label} {digest}" for label, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
