# SPDX-License-Identifier: Apache-2.0
"""Text files as an endless, resumable stream of tokens."""

from __future__ import annotations

import errno
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.config import DataSection
from activation_swap.trainer.corpus import Corpus, open_corpus
from activation_swap.trainer.stream import Position, TokenStream

pytestmark = pytest.mark.unit


def corpus_of(directory: Path, *contents: bytes) -> Corpus:
    for index, content in enumerate(contents):
        (directory / f"{index}.txt").write_bytes(content)
    return open_corpus(DataSection(files=(str(directory / "*.txt"),)), vocab_size=256)


def test_documents_follow_each_other_and_start_again(tmp_path: Path) -> None:
    stream = TokenStream(corpus_of(tmp_path, b"ab", b"c"))
    tokens = stream.take(batch_size=2, sequence_length=5)
    assert tokens.dtype is torch.int64
    assert bytes(tokens.flatten().tolist()) == b"ab\0c\0ab\0c\0"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=4),
    before=st.integers(1, 40),
    after=st.integers(1, 40),
)
def test_resumed_stream_goes_on_where_the_first_stopped(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], before: int, after: int
) -> None:
    corpus = corpus_of(tmp_path_factory.mktemp("corpus"), *contents)
    whole = TokenStream(corpus).take(batch_size=1, sequence_length=before + after)
    first = TokenStream(corpus)
    head = first.take(batch_size=1, sequence_length=before)
    tail = TokenStream(corpus, first.position).take(batch_size=1, sequence_length=after)
    assert torch.equal(torch.cat([head, tail], dim=1), whole)


def test_position_is_of_the_next_token(tmp_path: Path) -> None:
    stream = TokenStream(corpus_of(tmp_path, b"abc", b"d"))
    assert stream.position == Position(document=0, offset=0)
    stream.take(batch_size=1, sequence_length=5)
    assert stream.position == Position(document=1, offset=1)


@pytest.mark.parametrize("position", [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_position_outside_of_the_corpus_is_refused(
    position: tuple[int, int], tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path, b"ab", b"c")
    document, offset = position
    with pytest.raises(ValueError, match=f"no token {offset} of document {document}"):
        TokenStream(corpus, Position(document=document, offset=offset))


def test_default_is_the_standard_library_without_installed_packages() -> None:
    corpus = open_corpus(DataSection(), vocab_size=256)
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "argparse.py" in corpus.documents
    assert not any("site-packages" in path.parts for path in corpus.documents)
    assert list(corpus.documents) == sorted(corpus.documents)


def test_empty_files_are_skipped(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, b"", b"x")
    assert [path.name for path in corpus.documents] == ["1.txt"]


def test_digest_sees_the_list_of_documents(tmp_path: Path) -> None:
    before = corpus_of(tmp_path, b"abc").digest
    assert corpus_of(tmp_path, b"abc").digest == before
    assert corpus_of(tmp_path, b"abcd").digest != before
    assert corpus_of(tmp_path, b"abd").digest != before
    assert corpus_of(tmp_path, b"abc", b"d").digest != before


@pytest.mark.parametrize("content", [None, b""], ids=["no file", "no content"])
def test_nothing_to_read_is_rejected(content: bytes | None, tmp_path: Path) -> None:
    with pytest.raises(RejectedError) as caught:
        corpus_of(tmp_path, *([] if content is None else [content]))
    assert caught.value.reason is Reason.NO_TRAINING_DATA


@pytest.mark.parametrize("pattern", ["typo.txt", "b*.txt", "deep", "nul\0"], ids=repr)
def test_pattern_without_a_file_is_rejected_whatever_others_match(
    pattern: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "deep").mkdir()
    patterns = (str(tmp_path / "*.txt"), str(tmp_path / pattern))
    with pytest.raises(RejectedError) as caught:
        open_corpus(DataSection(files=patterns), vocab_size=256)
    assert caught.value.reason is Reason.NO_TRAINING_DATA
    assert caught.value.found == f"no file for {[patterns[1]]}"


def test_a_file_that_two_patterns_match_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    patterns = (str(tmp_path / "*.txt"), str(tmp_path / "a*"))
    corpus = open_corpus(DataSection(files=patterns), vocab_size=256)
    assert corpus.documents == (tmp_path / "a.txt",)


def test_file_that_cannot_be_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # whoever tests as root may read everything
    with pytest.raises(RejectedError, match=r"PermissionError: .*0\.txt") as caught:
        corpus_of(tmp_path, b"a")
    assert caught.value.reason is Reason.NO_TRAINING_DATA


def test_small_vocabulary_is_rejected() -> None:
    with pytest.raises(RejectedError, match="256 tokens, a model of 255") as caught:
        open_corpus(DataSection(), vocab_size=255)
    assert caught.value.reason is Reason.VOCABULARY_TOO_SMALL
    assert caught.value.found.startswith("bytes")
    assert "tokenizer" not in str(caught.value.where)


def word_tokenizer(directory: Path, *, end: str | None = "<end>") -> Path:
    words = {"<end>": 0, "a": 1, "b": 2}
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"},
            }
        )
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
    )
    return directory


def test_local_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("b a b")
    section = DataSection(
        files=(str(tmp_path / "words.txt"),), tokenizer=word_tokenizer(tmp_path / "tokenizer")
    )
    stream = TokenStream(open_corpus(section, vocab_size=3))
    tokens = stream.take(batch_size=1, sequence_length=8)
    assert tokens.tolist() == [[2, 1, 2, 0, 2, 1, 2, 0]]
    with pytest.raises(RejectedError) as caught:
        open_corpus(section, vocab_size=2)
    assert caught.value.reason is Reason.VOCABULARY_TOO_SMALL


def test_documents_without_a_token_are_passed_over(tmp_path: Path) -> None:
    for name, words in {"1": " ", "2": "b a", "3": "\n"}.items():
        (tmp_path / f"{name}.txt").write_text(words)
    tokenizer = word_tokenizer(tmp_path / "tokenizer", end=None)
    section = DataSection(files=(str(tmp_path / "*.txt"),), tokenizer=tokenizer)
    stream = TokenStream(open_corpus(section, vocab_size=3))
    assert stream.take(batch_size=1, sequence_length=5).tolist() == [[2, 1, 2, 1, 2]]


def test_text_that_gives_no_token_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text(" ")
    (tmp_path / "2.txt").write_text("\n")
    tokenizer = word_tokenizer(tmp_path / "tokenizer", end=None)
    section = DataSection(files=(str(tmp_path / "*.txt"),), tokenizer=tokenizer)
    with pytest.raises(RejectedError, match="2 of them with content") as caught:
        open_corpus(section, vocab_size=3)
    assert caught.value.reason is Reason.NO_TRAINING_DATA


def test_digest_sees_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("a b")
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    section = DataSection(files=(str(tmp_path / "1.txt"),), tokenizer=tokenizer)
    before = open_corpus(section, vocab_size=3).digest
    (tokenizer / "model.safetensors").write_bytes(b"weights beside it are not read")
    assert open_corpus(section, vocab_size=3).digest == before
    word_tokenizer(tokenizer, end=None)
    assert open_corpus(section, vocab_size=3).digest != before


@pytest.mark.parametrize("exists", [False, True], ids=["missing", "empty"])
def test_directory_without_tokenizer_is_rejected(exists: bool, tmp_path: Path) -> None:  # noqa: FBT001
    directory = tmp_path / "tokenizer"
    if exists:
        directory.mkdir()
    with pytest.raises(RejectedError) as caught:
        open_corpus(DataSection(tokenizer=directory), vocab_size=256)
    assert caught.value.reason is Reason.UNREADABLE_TOKENIZER


@pytest.mark.parametrize("content", ["{}", "[]", "", "{", '{"added_tokens": [1]}'])
@pytest.mark.parametrize("named", [True, False])
def test_broken_tokenizer_is_rejected(content: str, named: bool, tmp_path: Path) -> None:  # noqa: FBT001
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "tokenizer.json").write_text(content)
    if not named:
        (tokenizer / "tokenizer_config.json").unlink()
    with pytest.raises(RejectedError) as caught:
        open_corpus(DataSection(tokenizer=tokenizer), vocab_size=256)
    assert caught.value.reason is Reason.UNREADABLE_TOKENIZER
