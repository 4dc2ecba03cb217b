# SPDX-License-Identifier: Apache-2.0
"""Which values of the set-up and the policy are legal, at their bounds."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap._request import Mode, check_policy, check_setup
from activation_swap.errors import Reason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_bytes": 0},
        {"min_bytes": 1},
        {"min_coverage": 0},
        {"min_coverage": 0.0},
        {"min_coverage": 1},
        {"min_coverage": 1.0},
        {"keep_last": False},
        {"fraction": 0.001},
        {"fraction": 1},
        {"narrow": False},
        {"slab_bytes": 512},
        {"slab_bytes": 1 << 30},
        {"max_host_bytes": None},
        {"max_host_bytes": 0},
        {"max_host_bytes": 1 << 40},
        {"max_host_bytes": 64 << 20},
        {"max_host_bytes": 512, "slab_bytes": 512},
    ],
    ids=str,
)
def test_legal_policy(fields: dict[str, Any]) -> None:
    check = check_policy(SwapPolicy(**fields))

    assert check.passed
    assert (check.subject, check.expected, check.found) == ("swap policy", "legal", "legal")


@pytest.mark.parametrize(
    "fields",
    [
        {"min_bytes": 1.0},
        {"min_coverage": 1.001},
        {"min_coverage": "0.5"},
        {"fraction": 0},
        {"fraction": 1.001},
        {"fraction": True},
        {"slab_bytes": 256},
        {"slab_bytes": 513},
        {"slab_bytes": 768},
        {"slab_bytes": 1024.0},
        {"max_host_bytes": 1.5},
        {"max_host_bytes": 1},
        {"max_host_bytes": (64 << 20) - 1},
    ],
    ids=str,
)
def test_illegal_policy(fields: dict[str, Any]) -> None:
    check = check_policy(SwapPolicy(**fields))
    (name,) = fields

    assert check.rejection is not None
    assert check.rejection.where == f"SwapPolicy.{name}"


@pytest.mark.parametrize(
    "fields",
    [{}, {"pp_size": 2}, {"pp_size": 64}, {"activation_checkpoint": "mlp"}],
    ids=str,
)
def test_legal_setup(fields: dict[str, Any]) -> None:
    checks = check_setup(TrainingSetup(**fields))

    assert all(check.passed for check in checks)
    assert [check.subject for check in checks] == [
        "training set-up",
        "back end",
        "torch.compile of the trainer",
        "activation checkpointing of the trainer",
    ]


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (TrainingSetup(pp_size=0), Reason.INVALID_SETUP),
        (TrainingSetup(backend="mindspore"), Reason.OTHER_BACKEND),
        (None, Reason.NOT_A_TORCH_MODULE),
    ],
)
def test_no_model_is_looked_at_for_an_illegal_request(
    setup: TrainingSetup | None, reason: Reason
) -> None:
    explanation = registry.explain("a path", setup=setup)  # type: ignore[arg-type]

    assert [rejection.reason for rejection in explanation.rejections] == [reason]


def test_a_refused_checkpointing_is_expected_to_be_off() -> None:
    check = check_setup(TrainingSetup(activation_checkpoint="full"))[-1]

    assert check.rejection is not None
    assert (check.expected, check.found) == ("off", "full")


def test_modes_are_what_the_trainer_key_takes() -> None:
    assert get_args(Mode) == ("none", "attention")
