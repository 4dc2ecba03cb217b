# SPDX-License-Identifier: Apache-2.0
"""One device storage that the graph needs in backward, however often it was saved."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from activation_swap.core.group import Group

__all__ = ["SavedStorage"]


class SavedStorage:
    """A storage, where its bytes are, and the form in which they travel.

    The form is the geometry of the first save where that covers the storage without gaps, as it
    nearly always does: its copies then need no view on either side, and what comes back needs none
    to be the saved tensor. Otherwise it is flat.

    Args:
        group: The group it moves with.
        tensor: The first save.
        nbytes: Of its storage.
        narrow: Whether it crosses the link as the upper halves of its fp32 elements.

    Attributes:
        as_saved: Whether the form is that of the first save.
        group: See above.
        nbytes: Bytes on the device.
        dtype: Of the form: that of the first save, or ``uint8`` where its size does not fit.
        size: Of the form.
        stride: Of the form; no gaps, no overlaps.
        narrow: See above.
        link_bytes: Bytes that cross the link.
        link_dtype: Of the tensor that crosses the link.
        aliases: One (detached alias, version at save) per save while the original is on the
            device, ``None`` once it was given up. An alias, never the saved tensor: a node's own
            output would keep its graph alive for good. Autograd stops comparing versions once
            hooks are on, so that the handles do.
        reloaded: The data that came back, in the form; ``None`` before. As it crossed the link
            until :meth:`widen`.
        host: Its host bytes while they hold the data, see ``Move.host``.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "as_saved",
        "dtype",
        "group",
        "host",
        "link_bytes",
        "link_dtype",
        "narrow",
        "nbytes",
        "reloaded",
        "size",
        "stride",
    )

    def __init__(self, group: Group, tensor: torch.Tensor, nbytes: int, *, narrow: bool) -> None:
        self.group = group
        self.nbytes = nbytes
        self.dtype = tensor.dtype
        self.size: tuple[int, ...] = tensor.size()
        self.stride = tensor.stride()
        self.as_saved = tensor.nbytes == nbytes and _has_no_gaps(self.size, self.stride)
        if not self.as_saved:
            if nbytes % self.dtype.itemsize:
                self.dtype = torch.uint8
            self.size = (nbytes // self.dtype.itemsize,)
            self.stride = (1,)
        self.narrow = narrow
        self.link_bytes = nbytes // 2 if narrow else nbytes
        self.link_dtype = torch.bfloat16 if narrow else self.dtype
        self.aliases: list[tuple[torch.Tensor, int]] | None = []
        self.reloaded: torch.Tensor | None = None
        self.host: tuple[torch.Tensor, ...] = ()

    def original(self) -> torch.Tensor:
        """Return all of the original storage in the form, without a copy."""
        if not self.aliases:
            raise self.group.impossible(asked="a copy of a storage that was given up")
        alias, _ = self.aliases[0]
        if self.as_saved:
            return alias
        if alias.dtype is self.dtype:
            return alias.as_strided(self.size, self.stride, 0)
        return torch.empty(0, dtype=self.dtype, device=alias.device).set_(alias.untyped_storage())

    def widen(self) -> None:
        """Give what came back narrow its own dtype: exact, a shift by 16 bits. Repeatable."""
        data = self.reloaded
        if data is not None and data.dtype is not self.dtype:
            self.reloaded = data.to(self.dtype)


@lru_cache(maxsize=1024)
def _has_no_gaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements lie side by side in some order of the dimensions, each once."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True
