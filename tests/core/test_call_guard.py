# SPDX-License-Identifier: Apache-2.0
"""What is checked at every training forward, where no model of Transformers shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from activation_swap._site import Site
from activation_swap.core import torch_private
from activation_swap.core.call_guard import arity_error, check_call, check_recompute_flag
from activation_swap.core.hooked_site import HookedSite
from activation_swap.errors import Reason, RejectedError

pytestmark = pytest.mark.unit

EAGER: Any = SimpleNamespace(capturing=lambda: False)
# Both are callable; only the second says where it was defined.
NAMELESS: Any = dict.get
OF_CHECKPOINT: Any = checkpoint


class Flagged(nn.Identity):
    """Has a flag of gradient checkpointing."""

    def __init__(self, *, flag: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = flag


@pytest.mark.parametrize(
    ("owner", "refused"),
    [
        (Flagged(flag=True), True),
        (Flagged(flag=False), False),
        (Flagged(flag=True).eval(), False),
        (nn.Identity(), False),
        (None, False),
    ],
    ids=["on", "off", "on in evaluation", "without a flag", "without an owner"],
)
def test_recomputation_is_on_only_where_a_flag_says_so_in_training(
    owner: nn.Module | None, *, refused: bool
) -> None:
    module = nn.Identity()
    site = HookedSite(Site(fqn="attention", module=module, checkpoint_flag_owner=owner))

    if refused:
        with pytest.raises(RejectedError, match="flag is set"):
            check_recompute_flag(site)
    else:
        check_recompute_flag(site)


def test_a_flag_whose_owner_is_gone_says_nothing() -> None:
    module, owner = nn.Identity(), Flagged(flag=True)
    site = HookedSite(Site(fqn="attention", module=module, checkpoint_flag_owner=owner))
    del owner

    check_recompute_flag(site)


@pytest.mark.parametrize("position", [0, 1], ids=["the site", "its owner"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_a_site_or_owner_that_is_compiled_later_is_refused(position: int) -> None:
    modules = nn.Linear(1, 1), nn.Linear(1, 1)
    site = HookedSite(Site(fqn="attention", module=modules[0], owners=modules[1:]))
    check_call(site, EAGER)

    modules[position].compile()

    with pytest.raises(RejectedError) as refusal:
        check_call(site, EAGER)
    assert refusal.value.reason is Reason.COMPILED_LATER


@pytest.mark.parametrize(
    ("callback", "compiled"),
    [(None, False), (False, False), (lambda *_: None, True)],
    ids=["no callback", "cached code only", "a callback"],
)
def test_a_callback_of_dynamo_is_a_compilation(
    monkeypatch: pytest.MonkeyPatch, callback: object, *, compiled: bool
) -> None:
    monkeypatch.setattr(torch_private._eval_frame, "get_eval_frame_callback", lambda: callback)

    assert torch_private.under_dynamo() is compiled


@pytest.mark.parametrize(
    ("pack", "unpack", "reason"),
    [
        (NAMELESS, OF_CHECKPOINT, Reason.OUTER_HOOKS),
        (torch.detach, OF_CHECKPOINT, Reason.OUTER_HOOKS),
        (OF_CHECKPOINT, torch.detach, Reason.CHECKPOINTING_ENABLED_LATER),
    ],
)
def test_who_packs_says_whose_hooks_are_outside(pack: Any, unpack: Any, reason: Reason) -> None:
    module = nn.Identity()

    with saved_tensors_hooks(pack, unpack), pytest.raises(RejectedError) as refusal:
        check_call(HookedSite(Site(fqn="attention", module=module)), EAGER)

    assert refusal.value.reason is reason
    assert refusal.value.where == "attention"


@pytest.mark.parametrize(
    ("result", "expected", "found"),
    [
        ((1, 2), 2, None),
        ((1, 2), None, None),
        (1, None, None),
        ((1,), 2, "a tuple of 1"),
        ([1, 2], 2, "a list"),
        (None, 1, "a NoneType"),
    ],
)
def test_arity(result: object, expected: int | None, found: str | None) -> None:
    error = arity_error("attention", result, expected=expected)

    if found is None:
        assert error is None
    else:
        assert error is not None
        assert (error.where, error.found) == ("attention", found)
        assert error.expected == f"a tuple of {expected}"
