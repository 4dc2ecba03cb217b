# SPDX-License-Identifier: Apache-2.0
"""A profiler's trace shows each group's launches by the name of its attention."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.models import build, forward, swapped, tokens

pytestmark = pytest.mark.level0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_each_launch_is_a_range_named_after_its_attention() -> None:
    import torch

    model = build()
    layers = len(model.model.layers)
    with (
        swapped(model),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        forward(model, tokens(model)).loss.backward()
    names = Counter(
        event.name for event in profile.events() or () if event.name.startswith("activation_swap")
    )
    assert names == {
        f"activation_swap::{verb}(model.layers.{layer}.self_attn)": 1
        for verb in ("offload", "reload")
        for layer in range(layers - 1)
    }
