# SPDX-License-Identifier: Apache-2.0
"""PEFT LoRA on the projections of the attention, before and after ``apply``."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from activation_swap.errors import Reason
from tests.compose.combination import Combination
from tests.compose.run import Run, compare
from tests.compose.tiny_model import batch, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMBINATIONS"]

_RULE = "the adapters' own saved tensors (dropped input, low-rank product) move; their weights stay"


def lora(model: Any, *, dropout: float = 0.0, fp32_adapters: bool = False) -> Any:
    """Wrap ``model``; both matrices of the adapters are random, so that each has a gradient."""
    from peft import get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        # PEFT reads an attribute that Transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, _config(dropout), autocast_adapter_dtype=fp32_adapters)


def _config(dropout: float = 0.0) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        lora_dropout=dropout,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
    )


def train(
    run: Run,
    *,
    apply_first: bool,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    autocast: bool = False,
    fp32_adapters: bool = False,
    before_step: Callable[[Any, int], None] | None = None,
) -> None:
    """Train the adapters.

    Args:
        run: Plain or swapped.
        apply_first: Whether ``apply`` comes before ``get_peft_model``.
        dtype: Of all weights.
        dropout: Of the adapters' inputs.
        autocast: To bf16.
        fp32_adapters: Whether the adapters are fp32 beside bf16 weights, PEFT's default.
        before_step: Called with the PEFT model and the number of the step.
    """
    base = tiny_model(dtype)
    if apply_first:
        run.apply(base)
    model = lora(base, dropout=dropout, fp32_adapters=fp32_adapters)
    if not apply_first:
        run.apply(model.get_base_model())
    for step in range(run.steps):
        if before_step is not None:
            before_step(model, step)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.SGD(weights, lr=1e-2)
        with run.step():
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(**batch(step)).loss
            loss.backward()
            run.record(model, loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def manage_adapters(model: Any, step: int) -> None:
    """Add, switch, delete, merge, unmerge and disable adapters between steps."""
    if step == 0:
        model.add_adapter("other", _config())
        model.set_adapter("other")
    elif step == 1:
        model.set_adapter("default")
        model.delete_adapter("other")
        model.merge_adapter()
        model.unmerge_adapter()
        with model.disable_adapter(), torch.no_grad():
            model(**batch(9))


def merge_and_unload(run: Run) -> None:
    """Train a merged model on: PEFT takes its layers out, the swap stays."""
    base = tiny_model()
    run.apply(base)
    model = lora(base).merge_and_unload()
    model.requires_grad_(True)
    run.train(model)


def pass_the_wrapper() -> None:
    """Apply to the PeftModel."""
    Run.swapped().apply(lora(tiny_model()))


def _combinations() -> Iterator[Combination]:
    variants: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "bf16 with fp32 adapters": {"dtype": torch.bfloat16, "fp32_adapters": True},
        "dropout": {"dropout": 0.1},
        "autocast": {"autocast": True},
        "add, switch, delete, merge, unmerge, disable": {"before_step": manage_adapters},
    }
    for (name, options), first in product(variants.items(), (True, False)):
        yield Combination(
            tool="PEFT LoRA on q, k, v, o",
            name=f"{'apply, then wrap' if first else 'wrap, then apply'}; {name}",
            check=partial(
                compare, partial(train, apply_first=first, **options), memory=name == "fp32"
            ),
            remark=_RULE,
        )
    yield Combination(
        tool="PEFT LoRA on q, k, v, o",
        name="apply, wrap, merge_and_unload",
        check=partial(compare, merge_and_unload),
    )
    yield Combination(
        tool="PEFT LoRA on q, k, v, o",
        name="the PeftModel passed to apply",
        check=pass_the_wrapper,
        refused=Reason.WRAPPED_MODEL,
        remark="pass model.get_base_model()",
    )


COMBINATIONS = tuple(_combinations())
