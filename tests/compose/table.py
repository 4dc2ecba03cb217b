# SPDX-License-Identifier: Apache-2.0
"""All combinations, in the order of the table."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from tests.compose import (
    accelerate_prepare,
    attention_kinds,
    autocast,
    checkpoints,
    ddp,
    fsdp2,
    lora,
    moe_checkpointing,
    pipeline_fsdp2,
    refusals,
    tensor_parallel,
    trainers,
    training_loops,
    transformers_parallel,
)

if TYPE_CHECKING:
    from tests.compose.combination import Combination

__all__ = ["COMBINATIONS"]

COMBINATIONS: Final[dict[str, Combination]] = {
    combination.key: combination
    for combination in chain.from_iterable(
        module.COMBINATIONS
        for module in (
            fsdp2,
            ddp,
            tensor_parallel,
            transformers_parallel,
            pipeline_fsdp2,
            checkpoints,
            lora,
            autocast,
            accelerate_prepare,
            trainers,
            attention_kinds,
            training_loops,
            moe_checkpointing,
            refusals,
        )
    )
}
