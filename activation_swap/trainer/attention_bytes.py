# SPDX-License-Identifier: Apache-2.0
"""What one Qwen3-MoE attention saves for backward, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from activation_swap.core.narrowing import narrow_from

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AttentionBytes", "AttentionShape"]

_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The sizes that decide what an attention saves.

    Attributes:
        hidden: Width of the model.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        itemsize: Bytes of an element of the activations.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBytes:
    """Bytes of one attention group of one microbatch.

    Attributes:
        device: Device memory that the eligible storages take.
        link: What crosses the link in each direction.
    """

    device: int
    link: int

    @classmethod
    def of(cls, shape: AttentionShape, *, tokens: int, min_bytes: int) -> AttentionBytes:
        """Add up the storages of one attention with SDPA or flash attention.

        Args:
            shape: The sizes.
            tokens: Tokens of one microbatch.
            min_bytes: Storages below this many bytes stay on the device.
        """
        device = link = 0
        for on_device, on_link in _per_token(shape):
            nbytes = tokens * on_device
            if nbytes >= min_bytes:
                narrow = nbytes >= narrow_from(min_bytes)
                device += nbytes
                link += tokens * on_link if narrow else nbytes
        return cls(device=device, link=link)


def _per_token(shape: AttentionShape) -> Iterator[tuple[int, int]]:
    """Bytes per token of each storage, on the device and over the link where it may narrow."""
    item = shape.itemsize
    yield shape.hidden * item, shape.hidden * item  # the input, shared by q, k and v
    for heads in (shape.heads, shape.kv_heads):
        width = heads * shape.head_dim
        yield width * _FP32, width * item  # the norm's upcast crosses as what it was cast from
        yield width * item, width * item  # normalised
        yield width * item, width * item  # after RoPE
        yield heads * _FP32, heads * _FP32  # the norm's reciprocal root
    values, output = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    yield values * item, values * item
    yield output * item, output * item
    yield shape.heads * _FP32, shape.heads * _FP32  # the logarithm of the softmax's sum
