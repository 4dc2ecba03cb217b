# SPDX-License-Identifier: Apache-2.0
"""Every refusal of apply: reason, full text, nothing touched, and a right apply works after it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from activation_swap import registry
from activation_swap.compat.canary import tiny_model
from activation_swap.errors import ActivationSwapError, Reason
from tests.rejections.case import expected_text, stable_text
from tests.rejections.model_cases import MODEL_CASES
from tests.rejections.request_cases import REQUEST_CASES
from tests.rejections.site_cases import SITE_CASES

if TYPE_CHECKING:
    from tests.rejections.case import ApplyCase

APPLY_CASES = (*REQUEST_CASES, *MODEL_CASES, *SITE_CASES)

pytestmark = [
    pytest.mark.unit,
    # What torch.compile and PEFT import and read warn of themselves.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def fingerprint(model: Any) -> dict[str, Any]:
    """Identify everything that an installation could change."""
    stages = model if isinstance(model, list | tuple) else [model]
    return {
        f"{index}.{name}": (
            type(module),
            {key: id(value) for key, value in vars(module).items()},
            {
                key: [*map(id, value.values())]
                for key, value in vars(module).items()
                if isinstance(value, dict)
            },
        )
        for index, stage in enumerate(stages)
        if isinstance(stage, nn.Module)
        for name, module in stage.named_modules()
    }


@pytest.mark.parametrize("case", APPLY_CASES, ids=lambda case: case.name)
def test_refusal(case: ApplyCase) -> None:
    request = case.arrange(tiny_model().train())
    before, classes = fingerprint(request.model), request.registry.model_classes

    with request.around(), pytest.raises(ActivationSwapError) as refusal:
        request.apply()

    error = refusal.value
    assert error.reason is case.reason
    assert type(error) is case.reason.value.kind
    other_framework = case.reason in {Reason.NOT_A_TORCH_MODULE, Reason.OTHER_BACKEND}
    assert isinstance(error, NotImplementedError if other_framework else ValueError)
    assert stable_text(error) == expected_text(case.name)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes
    assert fingerprint(request.model) == before
    assert request.registry.model_classes == classes
    assert registry.apply("attention", tiny_model()).active


# What explain does not take cannot be refused by it.
WITHOUT_MODE_AND_POLICY = [
    case
    for case in APPLY_CASES
    if case.reason not in {Reason.UNKNOWN_MODE, Reason.INVALID_POLICY}
    and case.name != "swapped-with-another-policy"
]


@pytest.mark.parametrize("case", WITHOUT_MODE_AND_POLICY, ids=lambda case: case.name)
def test_explain_says_the_same(case: ApplyCase) -> None:
    request = case.arrange(tiny_model().train())

    with request.around():
        explanation = request.registry.explain(request.model, setup=request.setup)

    assert not explanation.supported
    assert explanation.rejections[0].reason is case.reason
    assert case.reason.value.code in str(explanation)
    for check in explanation.checks:
        assert all(isinstance(text, str) for text in (check.subject, check.expected, check.found))
