# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the MoE block alone, next to swapped attention; and of the layer."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from activation_swap.errors import Reason
from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMBINATIONS"]


def wrap(model: Any, part: str, implementation: CheckpointImpl) -> None:
    """Put the same part of every layer into a checkpoint wrapper."""
    for layer in model.model.layers:
        wrapped = checkpoint_wrapper(layer.get_submodule(part), checkpoint_impl=implementation)
        layer.set_submodule(part, wrapped)


def train(
    run: Run, *, apply_first: bool, implementation: CheckpointImpl, part: str = "mlp"
) -> None:
    """Train with a part of each layer recomputed."""
    model = tiny_model()
    if apply_first:
        run.apply(model)
    wrap(model, part, implementation)
    if not apply_first:
        run.apply(model)
    run.train(model)


def enable_on_the_model(*, apply_first: bool) -> None:
    """Let Transformers recompute whole layers."""
    model, run = tiny_model(), Run.swapped()
    if apply_first:
        run.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    if not apply_first:
        run.apply(model)
    model(**batch(0))


def checkpoint_the_call() -> None:
    """Recompute the whole model around a swapped one."""
    model, run = tiny_model(), Run.swapped()
    run.apply(model)
    checkpoint(lambda: model(**batch(0)).loss, use_reentrant=False)


def _combinations() -> Iterator[Combination]:
    for implementation in CheckpointImpl:
        for first in (True, False):
            scenario = partial(train, apply_first=first, implementation=implementation)
            yield Combination(
                tool="Checkpointing of the MoE block",
                name=(
                    f"{'apply, then wrap' if first else 'wrap, then apply'}; "
                    f"{implementation.name.lower().replace('_', '-')}"
                ),
                check=partial(compare, scenario),
            )
    refusals: dict[str, tuple[Any, Reason]] = {
        "layers, before apply": (
            partial(enable_on_the_model, apply_first=False),
            Reason.CHECKPOINTING_ON,
        ),
        "layers, after apply": (
            partial(enable_on_the_model, apply_first=True),
            Reason.CHECKPOINTING_ENABLED_LATER,
        ),
        "checkpoint wrapper around attention": (
            partial(
                train,
                Run.swapped(),
                apply_first=False,
                implementation=CheckpointImpl.NO_REENTRANT,
                part="self_attn",
            ),
            Reason.CHECKPOINT_WRAPPER,
        ),
        "checkpoint wrapper put around attention after apply": (
            partial(
                train,
                Run.swapped(),
                apply_first=True,
                implementation=CheckpointImpl.NO_REENTRANT,
                part="self_attn",
            ),
            Reason.CHECKPOINTING_ENABLED_LATER,
        ),
        "torch.utils.checkpoint around the model": (
            checkpoint_the_call,
            Reason.CHECKPOINTING_ENABLED_LATER,
        ),
    }
    for name, (check, reason) in refusals.items():
        yield Combination(
            tool="Checkpointing over attention", name=name, check=check, refused=reason
        )


COMBINATIONS = tuple(_combinations())
