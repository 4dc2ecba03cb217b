# SPDX-License-Identifier: Apache-2.0
"""The contract check of adapters tells what each broken adapter does wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import SwapPolicy, TrainingSetup
from activation_swap.adapters import BUILT_IN, Inspection
from activation_swap.compat.canary import tiny_model
from activation_swap.errors import Reason, RejectedError
from activation_swap.testing import check_adapter, compare_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from activation_swap._site import Site

    Break = Callable[[nn.Module, Inspection], Inspection]

pytestmark = pytest.mark.unit

(REAL,) = BUILT_IN


def loss(model: Any) -> torch.Tensor:
    tokens = torch.arange(16).reshape(2, 8)
    value: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return value


@dataclass(frozen=True)
class Broken:
    """The built-in adapter with one fault."""

    fault: Break
    model_classes: tuple[str, ...] = REAL.model_classes
    mode: str = "attention"

    def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
        return self.fault(model, REAL.inspect(model, setup=setup))


def each(**changes: Any) -> Break:
    """Change the same fields of every site."""

    def fault(_: nn.Module, found: Inspection) -> Inspection:
        return replace(found, sites=tuple(replace(site, **changes) for site in found.sites))

    return fault


def sites(change: Callable[[tuple[Site, ...]], tuple[Site, ...]]) -> Break:
    return lambda _, found: replace(found, sites=change(found.sites))


def mark(model: nn.Module, found: Inspection) -> Inspection:
    model.mark = len(found.sites)  # type: ignore[assignment]
    return found


def test_the_built_in_adapter_keeps_its_contract() -> None:
    check_adapter(REAL, tiny_model, loss)


@pytest.mark.filterwarnings("ignore:activation_swap. attention moved nothing:RuntimeWarning")
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        pytest.param(mark, "inspect changed the model", id="changes-the-model"),
        pytest.param(
            sites(lambda found: tuple(replace(s, fqn=f"x{s.fqn}") for s in found)),
            "site 'xmodel.layers.0.self_attn': the model has another module",
            id="wrong-fqn",
        ),
        pytest.param(
            each(owners=()),
            "site 'model.layers.0.self_attn': owners without "
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
            id="no-owners",
        ),
        pytest.param(
            each(checkpoint_flag_owner=None),
            "checkpoint_flag_owner is not one of its flagged owners",
            id="no-flag",
        ),
        pytest.param(sites(lambda found: found[:1]), "and no site", id="one-left-out"),
        pytest.param(sites(lambda found: found[::-1]), "and a forward calls", id="wrong-order"),
        pytest.param(sites(lambda found: found * 2), "as a site twice", id="listed-twice"),
        pytest.param(each(returns=3), "returns=3, and it returned 2", id="wrong-arity"),
        pytest.param(
            lambda _, found: replace(found, checks=()),
            "with an nn.Identity in its place no check refuses",
            id="takes-anything",
        ),
    ],
)
def test_a_fault_is_named(fault: Break, problem: str) -> None:
    with pytest.raises(RejectedError) as refusal:
        check_adapter(Broken(fault), tiny_model, loss)

    error = refusal.value
    assert error.reason is Reason.ADAPTER_CONTRACT
    assert problem in "\n".join((error.found, *error.trace))


def test_a_refused_model_and_another_class_are_named() -> None:
    def checkpointing() -> Any:
        model: Any = tiny_model()
        model.model.layers[0].gradient_checkpointing = True
        return model

    with pytest.raises(RejectedError, match=r"the model of build\(\) is refused: AS303"):
        check_adapter(REAL, checkpointing, loss)
    with pytest.raises(RejectedError, match="model_classes without transformers"):
        check_adapter(Broken(mark, model_classes=("a.B",)), tiny_model, loss)


def test_a_comparison_sees_one_bit() -> None:
    calls = []

    def drifting(model: Any) -> torch.Tensor:
        calls.append(model)
        return loss(model) * (1 + 1e-6 * (len(calls) == 4))

    comparison = compare_runs(tiny_model, drifting, steps=2)

    assert comparison.first_difference is not None
    assert comparison.first_difference.endswith("in step 1")
    assert comparison.repeats
    assert not comparison.passed


def test_a_comparison_tells_a_negative_zero_from_zero() -> None:
    signs = iter((1.0, -1.0, 1.0, 1.0))

    def zero(model: Any) -> torch.Tensor:
        return loss(model) * 0.0 * next(signs)

    comparison = compare_runs(tiny_model, zero, steps=1)

    assert comparison.first_difference == "loss in step 0"
    assert comparison.repeats


def test_a_comparison_takes_a_nan_for_its_copy() -> None:
    comparison = compare_runs(tiny_model, lambda model: loss(model) * torch.nan, steps=1)

    assert comparison.first_difference is None
    assert comparison.repeats


def test_a_comparison_names_the_first_that_differs() -> None:
    """In the order of the model; sets have another one in every process."""
    calls = []

    def doubled(model: Any) -> torch.Tensor:
        calls.append(model)
        value = loss(model)
        # The loss of the second model has the same value, and gradients of twice the size.
        return value if len(calls) % 2 else value * 2 - value.detach()

    first = next(name for name, _ in tiny_model().named_parameters())
    comparison = compare_runs(tiny_model, doubled, steps=1)

    assert comparison.first_difference == f"gradient of {first} in step 0"


@pytest.mark.filterwarnings("ignore:activation_swap. attention moved nothing:RuntimeWarning")
def test_a_model_that_does_not_repeat_itself_is_not_held_against_the_swap() -> None:
    calls = []

    def drifting(model: Any) -> torch.Tensor:
        calls.append(model)
        return loss(model) * (1 + 1e-6 * len(calls))

    comparison = compare_runs(tiny_model, drifting, steps=1)

    assert comparison.first_difference is not None
    assert not comparison.repeats
    assert comparison.passed
    check_adapter(REAL, tiny_model, drifting)
    nothing = compare_runs(tiny_model, drifting, steps=1, policy=SwapPolicy(min_bytes=1 << 30))
    assert not nothing.passed


def test_bits_that_differ_are_a_fault_of_the_adapter() -> None:
    from activation_swap.core.hooks import BeforeAttention

    def changed_by_a_swap(model: Any) -> torch.Tensor:
        hooks = model.model.layers[0].self_attn._forward_pre_hooks.values()
        return loss(model) * (2 if any(isinstance(h, BeforeAttention) for h in hooks) else 1)

    with pytest.raises(RejectedError, match="bits differ: "):
        check_adapter(REAL, tiny_model, changed_by_a_swap)


@pytest.mark.filterwarnings("ignore:activation_swap. attention moved nothing:RuntimeWarning")
def test_a_comparison_that_moves_nothing_has_not_passed() -> None:
    comparison = compare_runs(tiny_model, loss, steps=1, policy=SwapPolicy(min_bytes=1 << 30))

    assert comparison.first_difference is None
    assert not comparison.passed
