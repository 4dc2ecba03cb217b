# SPDX-License-Identifier: Apache-2.0
"""Gradients that nobody applies: freed as they come, and digested when asked."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GradientSink", "digest"]


class GradientSink:
    """Frees each gradient inside backward, so that no two microbatches' live at once.

    Args:
        parameters: By name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._hashes: dict[str, list[torch.Tensor]] | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    def begin(self) -> None:
        """Begin to digest."""
        self._hashes = defaultdict(list)

    def finish(self) -> tuple[str, int]:
        """End it; return the digest, and the number of gradients in it."""
        hashes = {
            f"{name} {number:06d}": value
            for name, values in (self._hashes or {}).items()
            for number, value in enumerate(values)
        }
        self._hashes = None
        return digest(hashes), len(hashes)

    def sweep(self) -> None:
        """Take what no hook saw: torch's split backward writes weight gradients by itself."""
        for name, parameter in self._parameters.items():
            self._take(name, parameter)

    def close(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        return lambda parameter: self._take(name, parameter)

    def _take(self, name: str, parameter: torch.nn.Parameter) -> None:
        gradient: Any = parameter.grad
        if gradient is None:
            return
        if self._hashes is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            self._hashes[name].append(torch.hash_tensor(local))
        parameter.grad = None


def digest(hashes: dict[str, torch.Tensor]) -> str:
    """Combine one hash of each name, in whatever order they came."""
    names = sorted(hashes)
    values = torch.stack([hashes[name].reshape(()) for name in names]).cpu()
    combined = hashlib.sha256("\n".join(names).encode())
    combined.update(values.view(torch.int64).numpy().tobytes())
    return combined.hexdigest()
