# SPDX-License-Identifier: Apache-2.0
"""A corpus as an endless stream of tokens whose position can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

if TYPE_CHECKING:
    from activation_swap.trainer.corpus import Corpus

__all__ = ["Position", "TokenStream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a stream stands.

    Attributes:
        document: Index of the document.
        offset: Tokens of it that were taken.
    """

    document: Annotated[int, Field(ge=0)] = 0
    offset: Annotated[int, Field(ge=0)] = 0


class TokenStream:
    """Reads a corpus document by document, and again from the start when it ends.

    Args:
        corpus: What is read.
        position: Where to begin. (Default: at the start)

    Raises:
        ValueError: The corpus has no such position.
    """

    def __init__(self, corpus: Corpus, position: Position | None = None) -> None:
        self._corpus = corpus
        self._position = Position() if position is None else position
        document, offset = self._position.document, self._position.offset
        known = 0 <= document < len(corpus.documents)
        self._tokens = self._read(document) if known else torch.empty(0)
        if not known or not 0 <= offset <= len(self._tokens):
            msg = f"there is no token {offset} of document {document}"
            raise ValueError(msg)

    @property
    def position(self) -> Position:
        """Where the next token comes from."""
        return self._position

    def take(self, *, batch_size: int, sequence_length: int) -> torch.Tensor:
        """Return the next tokens.

        Args:
            batch_size: Number of sequences.
            sequence_length: Tokens per sequence.

        Returns:
            Token ids ``[batch_size, sequence_length]``, int64 on the CPU.
        """
        parts: list[torch.Tensor] = []
        missing = batch_size * sequence_length
        document, offset = self._position.document, self._position.offset
        while missing > 0:
            if offset == len(self._tokens):
                document, offset = (document + 1) % len(self._corpus.documents), 0
                self._tokens = self._read(document)
            part = self._tokens[offset : offset + missing]
            parts.append(part)
            offset += len(part)
            missing -= len(part)
        self._position = Position(document=document, offset=offset)
        return torch.cat(parts).view(batch_size, sequence_length)

    def _read(self, document: int) -> torch.Tensor:
        return self._corpus.encode(self._corpus.documents[document].read_bytes())
