# SPDX-License-Identifier: Apache-2.0
"""fp32 tensors that hold nothing but bf16 values cross the link as bf16."""

from __future__ import annotations

import sys

import torch

from activation_swap.core.torch_private import input_dtype_of_cast

__all__ = ["is_upcast", "narrow_from", "upper_halves"]

_NARROW_FROM = 16
"""In units of ``min_bytes``: below, the kernels' launch costs more time than the copy saves."""
_UPPER_HALF = 1 if sys.byteorder == "little" else 0


def narrow_from(min_bytes: int) -> int:
    """Return the size in bytes from which half of a fp32 storage is worth two more kernels.

    Args:
        min_bytes: Of the policy: what is worth a copy at all.
    """
    return _NARROW_FROM * min_bytes


def is_upcast(tensor: torch.Tensor) -> bool:
    """Whether the autograd graph proves that ``tensor`` (fp32) is an unchanged upcast of bf16.

    RMSNorm computes in fp32, and what it saves is such an upcast. A fp32 linear layer, as LoRA's
    are, saves one in two dimensions: ``Tensor.view`` keeps all elements, so it is one, too.

    bf16 is the upper half of fp32, so that the lower half of every element is zero and need not
    travel. fp16 has other exponent bits, a cast back to it would not keep the payload of a NaN:
    fp16 upcasts stay wide.
    """
    return (
        tensor.dtype is torch.float32
        # A change after the cast would be in the version, which views share: no proof then.
        and tensor._version == 0
        and input_dtype_of_cast(tensor) is torch.bfloat16
    )


def upper_halves(wide: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of a contiguous fp32 tensor as bf16: no arithmetic, any NaN."""
    halves = wide.view(torch.bfloat16)
    # Every second element from the first upper half on. One operation: slicing would be two more.
    stride = tuple([2 * step for step in wide.stride()])
    return torch.as_strided_copy(
        halves, wide.size(), stride, 2 * wide.storage_offset() + _UPPER_HALF
    )
