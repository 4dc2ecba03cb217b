# SPDX-License-Identifier: Apache-2.0
"""What is left of a model when it is cut into stages."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.stage import prune
from tests.models import VERY_TINY, build

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
def test_a_tied_head_is_refused_before_anything_is_cut(
    first: bool,  # noqa: FBT001
    last: bool,  # noqa: FBT001
) -> None:
    model = build(VERY_TINY, tie_word_embeddings=True)
    layers = len(model.model.layers)
    with pytest.raises(RejectedError) as refused:
        prune(model, range(1), first=first, last=last)
    assert refused.value.reason is Reason.TIED_EMBEDDING
    assert len(model.model.layers) == layers


def test_a_tied_head_stays_tied_in_the_only_stage() -> None:
    model = build(VERY_TINY, tie_word_embeddings=True)
    only: Any = prune(model, range(1), first=True, last=True)
    assert only.lm_head.weight is only.model.embed_tokens.weight
    assert len(only.model.layers) == 1


def test_embedding_norm_and_head_are_where_they_belong() -> None:
    first: Any = prune(build(VERY_TINY), range(1), first=True, last=False)
    last: Any = prune(build(VERY_TINY), range(1, 2), first=False, last=True)
    assert isinstance(first.model.embed_tokens, nn.Embedding)
    assert isinstance(first.model.norm, nn.Identity)
    assert isinstance(first.lm_head, nn.Identity)
    assert isinstance(last.model.embed_tokens, nn.Identity)
    assert not isinstance(last.model.norm, nn.Identity)
    assert isinstance(last.lm_head, nn.Linear)
    assert [model.model.config.num_hidden_layers for model in (first, last)] == [1, 1]
