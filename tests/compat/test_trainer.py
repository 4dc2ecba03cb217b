# SPDX-License-Identifier: Apache-2.0
"""What the reference trainer asks of Transformers itself; the version matrix runs this file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from activation_swap import SwapPolicy, registry
from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.model import build_model
from tests.models import difference, step, tokens

pytestmark = [pytest.mark.matrix, pytest.mark.level0, pytest.mark.usefixtures("exact")]


def build(**values: Any) -> Any:
    """Build the tiny preset, smaller, as ``train`` does."""
    # Not a ModelSection: the environments of the matrix have no pydantic.
    section: Any = SimpleNamespace(
        source="tiny",
        overrides={"hidden_size": 32, "num_hidden_layers": 3, "moe_intermediate_size": 8},
        dtype="bfloat16",
        attn_implementation="sdpa",
        experts_implementation=None,
    )
    vars(section).update(values)
    return build_model(section, device=torch.device("cpu"), seed=0)


def test_a_step_of_its_model_has_the_same_bits_with_the_swap() -> None:
    plain, model = build(), build()
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"
    swap = registry.apply("attention", model, policy=SwapPolicy(min_bytes=0))

    ids = tokens(plain)
    assert difference(step(model, ids), step(plain, ids)) is None
    assert swap.stats().offloaded_bytes > 0


def test_an_experts_implementation_is_passed_on_or_refused() -> None:
    if Version(transformers.__version__) < Version("5.0.dev0"):
        with pytest.raises(RejectedError) as refused:
            build(experts_implementation="grouped_mm")
        assert refused.value.reason is Reason.NO_EXPERTS_CHOICE
    else:
        model = build(experts_implementation="grouped_mm")
        assert model.config._experts_implementation == "grouped_mm"
