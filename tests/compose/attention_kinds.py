# SPDX-License-Identifier: Apache-2.0
"""Implementations of attention, masks, packed rows, what the model returns, caches."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS"]

_LENGTHS = (13, 20, 7)


def padded(seed: int) -> dict[str, Any]:
    """Return rows of which the first begins with padding."""
    inputs = batch(seed)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :9] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    return {**inputs, "attention_mask": mask, "labels": labels}


def packed(seed: int) -> dict[str, Any]:
    """Return one row of three sequences, with the keywords that flash attention reads."""
    ends = functional.pad(torch.tensor(_LENGTHS).cumsum(0), (1, 0)).int()
    return {
        **batch(seed, rows=1, sequence=sum(_LENGTHS)),
        "position_ids": torch.cat([torch.arange(length) for length in _LENGTHS])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(_LENGTHS),
        "max_length_k": max(_LENGTHS),
    }


def train(
    run: Run,
    *,
    inputs: Callable[[int], dict[str, Any]] = batch,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> None:
    """Train; what the model returns lives through the backward."""
    model = tiny_model(dtype, **config)
    run.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        torch.manual_seed(step)
        with run.step():
            output = model(**inputs(step))
            output.loss.backward()
            run.record(model, output.loss)
            del output
        optimizer.step()
        optimizer.zero_grad()


def _combinations() -> Iterator[Combination]:
    variants: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "padding mask": {"inputs": padded},
        "packed rows with cu_seq_lens": {"inputs": packed},
        "attention dropout": {"attention_dropout": 0.1},
        "sliding window": {"use_sliding_window": True, "sliding_window": 8},
    }
    for kind, (name, options) in product(("eager", "sdpa"), variants.items()):
        yield Combination(
            tool="Attention implementation",
            name=f"{kind}; {name}",
            check=partial(compare, partial(train, attn_implementation=kind, **options)),
            quick=kind == "sdpa" or name in {"fp32", "bf16"},
        )
    yield Combination(
        tool="Attention implementation",
        name="flex_attention",
        remark="torch has no backward of it on a CPU; make gpu-test runs it",
    )
    yield Combination(
        tool="Attention implementation",
        name="flash attention kernels",
        remark="they need an accelerator; SDPA's own flash kernel is what the benchmarks run",
    )
    returns: dict[str, dict[str, Any]] = {
        "output_router_logits": {"output_router_logits": True},
        "output_hidden_states": {"output_hidden_states": True},
    }
    for name, config in returns.items():
        yield Combination(
            tool="What the model returns",
            name=name,
            check=partial(compare, partial(train, **config), memory=True),
        )
    yield Combination(
        tool="What the model returns",
        name="use_cache left on",
        check=partial(compare, partial(train, use_cache=True), warns_of="use_cache=False"),
        remark="a warning names use_cache: the cache holds keys and values until it goes",
    )
    yield Combination(
        tool="What the model returns",
        name="output_attentions",
        check=partial(compare, partial(train, output_attentions=True, attn_implementation="eager")),
        remark="what is returned is free only when it goes",
    )


COMBINATIONS = tuple(_combinations())
