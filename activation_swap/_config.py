# SPDX-License-Identifier: Apache-2.0
"""What a trainer tells the registry: frozen, keyword-only values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SwapPolicy", "TrainingSetup"]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """What the trainer knows and the model cannot tell.

    Attributes:
        backend: Training framework. Only ``"pytorch"`` is implemented.
        pp_size: Number of pipeline ranks. Above 1, a training forward before ``Swap.attach`` (or
            outside the verbs of ``Swap.groups``) is an error.
        compile: Whether the trainer will compile the model.
        activation_checkpoint: ``"off"``; ``"mlp"`` when the trainer recomputes MLP or MoE blocks
            alone, which goes together; or its name for any other mode, which is refused.
    """

    backend: str = "pytorch"
    pp_size: int = 1
    compile: bool = False
    activation_checkpoint: str = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPolicy:
    """Which saved tensors move, and how much host memory they may take.

    Attributes:
        min_bytes: Storages below this many bytes stay on the device: their launch costs more time
            than their memory is worth. (Default: 1 MiB)
        min_coverage: A view that spans less than this part of its storage does not make the
            storage move: most of it belongs to somebody else. (Default: 0.5)
        keep_last: Leave the last attention of a layer chain on the device, since its backward
            comes first. (Default: ``True``)
        fraction: Part of the attentions whose saved tensors move, spread evenly over the layers.
            Below 1 the others cost no time at all, and the copies of those that move have longer
            to hide: 0.5 halves both the gain and the cost. (Default: 1.0)
        narrow: Let a fp32 tensor that the graph proves to be an upcast of bf16 cross the link as
            bf16; the round trip gives the same bits. Below 16 times ``min_bytes`` it is not worth
            its kernels. (Default: ``True``)
        slab_bytes: Size of one pinned slab. Pinned memory grows slab by slab. A power of two, so
            that the framework's pinned allocator rounds nothing up. (Default: 64 MiB)
        max_host_bytes: Ceiling of pinned memory, or ``None`` for what the operating system
            allows. Groups beyond it stay on the device. 0 keeps all; else at least ``slab_bytes``.
            (Default: ``None``)
    """

    min_bytes: int = MIB
    min_coverage: float = 0.5
    keep_last: bool = True
    fraction: float = 1.0
    narrow: bool = True
    slab_bytes: int = 64 * MIB
    max_host_bytes: int | None = None
