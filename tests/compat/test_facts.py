# SPDX-License-Identifier: Apache-2.0
"""The table of facts: complete, without overlap, and equal to what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from activation_swap.compat import facts
from activation_swap.compat.facts import (
    ATTENTION_SIGNATURE,
    CHECKPOINT_FLAG,
    CHECKPOINT_SITE,
    DTYPE_ARGUMENT,
    EXPERTS_ARGUMENT,
    FACTS,
    SUPPORTED,
    TESTED,
    CheckpointFlag,
    CheckpointSite,
    Fact,
)

pytestmark = pytest.mark.unit

MINORS = [*(f"4.{minor}" for minor in range(51, 58)), *(f"5.{minor}" for minor in range(25))]
VERSIONS = [
    f"{minor}{patch}" for minor in MINORS for patch in (".0.dev0", ".0rc1", ".0", ".9", ".1.post1")
]
COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.json"

CACHES = {
    "past_key_value=None, cache_position=None": MINORS[:5],
    "past_key_values=None, cache_position=None": MINORS[5:11],
    "past_key_values=None": MINORS[11:31],
    "cache=None": MINORS[31:],
}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_exactly_one_row_holds_for_every_release(fact: Fact[Any]) -> None:
    for version in (*VERSIONS, "5.25.0.dev0", "5.25.0", "6.0.0"):
        holding = [row for row in fact.rows if row.versions.contains(version, prereleases=True)]

        assert len(holding) == 1, version
        assert fact.at(Version(version)) == holding[0].value


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_rows_say_why_they_are_there_and_when_they_may_go(fact: Fact[Any]) -> None:
    for row in fact.rows:
        assert len(row.changed) > 10
        assert len(row.delete_when) > 10
    assert len({row.value for row in fact.rows}) == len(fact.rows)


def test_every_fact_of_the_module_is_listed_once() -> None:
    defined = [value for value in vars(facts).values() if isinstance(value, Fact)]

    assert sorted(fact.name for fact in defined) == sorted(fact.name for fact in FACTS)
    assert len({fact.name for fact in FACTS}) == len(FACTS)


def test_tested_releases_begin_with_support_and_end_with_the_newest_row() -> None:
    for version in VERSIONS:
        assert SUPPORTED.contains(version, prereleases=True)
        assert TESTED.contains(version, prereleases=True)
    for version in ("4.50.3", "4.9", "3.0"):
        assert not SUPPORTED.contains(version, prereleases=True)
    for version in ("5.25.0.dev0", "5.25.0", "6.0.0rc1"):
        assert SUPPORTED.contains(version, prereleases=True)
        assert not TESTED.contains(version, prereleases=True)


@pytest.mark.parametrize(
    ("minor", "cache"), [(minor, cache) for cache, minors in CACHES.items() for minor in minors]
)
def test_measured_signature(minor: str, cache: str) -> None:
    assert ATTENTION_SIGNATURE.at(Version(f"{minor}.0")) == (
        f"(self, hidden_states, position_embeddings, attention_mask, {cache}, **kwargs)"
    )


@pytest.mark.parametrize(
    ("minors", "site", "flag"),
    [
        (MINORS[:2], CheckpointSite.MODEL_LOOP, CheckpointFlag.STACK),
        (MINORS[2:30], CheckpointSite.LAYER_CALL, CheckpointFlag.LAYER),
        (MINORS[30:], CheckpointSite.LAYER_FORWARD, CheckpointFlag.LAYER),
    ],
    ids=["4.51-4.52", "4.53-5.22", "5.23-5.24"],
)
def test_measured_checkpointing(
    minors: list[str], site: CheckpointSite, flag: CheckpointFlag
) -> None:
    for minor in minors:
        assert CHECKPOINT_SITE.at(Version(f"{minor}.0")) is site
        assert CHECKPOINT_FLAG.at(Version(f"{minor}.0")) is flag


def test_measured_names_of_what_a_model_is_built_with() -> None:
    dtypes = [DTYPE_ARGUMENT.at(Version(f"{minor}.0")) for minor in MINORS]
    assert dtypes == ["torch_dtype"] * 5 + ["dtype"] * 27
    experts = [EXPERTS_ARGUMENT.at(Version(f"{minor}.0")) for minor in MINORS]
    assert experts == [None] * 7 + ["experts_implementation"] * 25


def test_every_tested_minor_passed_the_matrix() -> None:
    rows = json.loads(COMPATIBILITY.read_text(encoding="utf-8"))["transformers"]
    passed = {".".join(row["version"].split(".")[:2]) for row in rows if row["result"] == "pass"}

    assert passed == set(MINORS)
    assert all(row["result"] == "pass" for row in rows)
