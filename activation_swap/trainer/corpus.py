# SPDX-License-Identifier: Apache-2.0
"""The text of a run: which files, in which order, turned into tokens how."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from activation_swap.trainer.config import DataSection

__all__ = ["Corpus", "open_corpus"]

_BYTES = 256
_END_OF_DOCUMENT = b"\0"
# A tokenizer may lie beside weights, which are large and decide no token.
_TOKENIZER_SUFFIXES = frozenset({".json", ".model", ".txt"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The documents of a run, in order.

    Attributes:
        documents: Paths of non-empty files.
        encode: From a file's content to its token ids, int64 on the CPU.
        vocab_size: Token ids are below this.
        digest: Changes with the name or content of a document or of a file of the tokenizer.
    """

    documents: tuple[Path, ...]
    encode: Callable[[bytes], torch.Tensor]
    vocab_size: int
    digest: str


def open_corpus(section: DataSection, *, vocab_size: int) -> Corpus:
    """Find the files and the tokenizer.

    Args:
        section: Which files and tokenizer.
        vocab_size: Number of token ids that the model has an embedding for.

    Returns:
        The corpus.

    Raises:
        RejectedError: AS405 when a pattern matches no file, a file cannot be read or none gives a
            token, AS406 when the tokenizer cannot be read, AS407 when it has more tokens than the
            model.
    """
    encode, needed = _encoder(section.tokenizer)
    documents: tuple[Path, ...] = ()
    digest = ""
    try:
        matches = _matches(section.files)
        paths = sorted({path for found in matches.values() for path in found})
        documents = tuple(path for path in paths if path.stat().st_size > 0)
        problem = _problem(matches, documents, encode)
        digest = _digest([*documents, *_tokenizer_files(section.tokenizer)])
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise Reason.NO_TRAINING_DATA.error(found=problem, where="data.files")
    if needed > vocab_size:
        tokens = "bytes, which are" if section.tokenizer is None else "a tokenizer of"
        raise Reason.VOCABULARY_TOO_SMALL.error(
            found=f"{tokens} {needed} tokens, a model of {vocab_size}",
            where="vocab_size of the model",
        )
    return Corpus(documents=documents, encode=encode, vocab_size=needed, digest=digest)


def _matches(patterns: tuple[str, ...] | None) -> dict[str, list[Path]]:
    """Return the files of each pattern."""
    if patterns is None:
        root = Path(sysconfig.get_path("stdlib"))
        foreign = {"site-packages", "dist-packages"}
        paths = (path for path in root.rglob("*.py") if foreign.isdisjoint(path.parts))
        return {str(root): list(paths)}
    # `Path.glob` takes no absolute pattern.
    names = {pattern: glob.glob(pattern, recursive=True) for pattern in patterns}  # noqa: PTH207
    return {
        pattern: [path for path in map(Path, found) if path.is_file()]
        for pattern, found in names.items()
    }


def _problem(
    matches: Mapping[str, Sequence[Path]],
    documents: tuple[Path, ...],
    encode: Callable[[bytes], torch.Tensor],
) -> str | None:
    if without := [pattern for pattern, paths in matches.items() if not paths]:
        return f"no file for {without}"
    if any(len(encode(path.read_bytes())) for path in documents):
        return None
    return f"no token in the files for {list(matches)}, {len(documents)} of them with content"


def _tokenizer_files(tokenizer: Path | None) -> list[Path]:
    if tokenizer is None:
        return []
    return sorted(path for path in tokenizer.iterdir() if path.suffix in _TOKENIZER_SUFFIXES)


def _digest(paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(json.dumps([path.name, content]).encode())
    return whole.hexdigest()


def _encoder(tokenizer: Path | None) -> tuple[Callable[[bytes], torch.Tensor], int]:
    if tokenizer is None:
        return _encode_bytes, _BYTES
    try:
        # `resolve` makes it a path for Transformers, never the name of a repository.
        words = AutoTokenizer.from_pretrained(
            tokenizer.resolve(strict=True), local_files_only=True, trust_remote_code=False
        )
        needed = len(words)
    except Exception as error:  # its parsers raise whatever they like, Exception itself included
        raise Reason.UNREADABLE_TOKENIZER.error(
            found=f"{type(error).__name__}: {error}", where=f"data.tokenizer: {tokenizer}"
        ) from error

    def encode(content: bytes) -> torch.Tensor:
        text = content.decode("utf-8", errors="replace")
        ids = words(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = [] if words.eos_token_id is None else [words.eos_token_id]
        return torch.tensor(ids + end, dtype=torch.int64)

    return encode, needed


def _encode_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content + _END_OF_DOCUMENT), dtype=torch.uint8).long()
