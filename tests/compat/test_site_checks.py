# SPDX-License-Identifier: Apache-2.0
"""The checks of sites that no built-in adapter selects: owners that the model does not hold."""

from __future__ import annotations

import pytest
from torch import nn

from activation_swap._site import Site
from activation_swap.compat.site_checks import check_sites
from activation_swap.errors import Reason

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


class Flagged(nn.Identity):
    """Has the flag of gradient checkpointing."""

    def __init__(self, *, gradient_checkpointing: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing


def refusals(*sites: Site) -> list[tuple[Reason, str | None]]:
    return [
        (check.rejection.reason, check.rejection.where)
        for check in check_sites(sites, {})
        if check.rejection is not None
    ]


def test_every_unnamed_owner_is_checked() -> None:
    owners = (nn.Identity(), nn.Identity(), nn.Identity())
    site = Site(fqn="attention", module=nn.Linear(1, 1), owners=owners)
    assert refusals(site) == []

    owners[1].compile()

    assert refusals(site) == [(Reason.COMPILED_MODEL, "owners[1] of attention")]


def test_every_module_of_an_unnamed_site_is_checked() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[0].compile()

    assert refusals(Site(fqn="attention", module=module)) == [
        (Reason.COMPILED_MODEL, "attention.0")
    ]


def test_every_unnamed_owner_of_a_flag_is_checked() -> None:
    owners = (
        Flagged(gradient_checkpointing=True),
        Flagged(gradient_checkpointing=False),
        nn.Identity(),
        None,
    )
    sites = [
        Site(fqn=f"attention.{index}", module=nn.Linear(1, 1), checkpoint_flag_owner=owner)
        for index, owner in enumerate(owners)
    ]

    assert refusals(*sites) == [(Reason.CHECKPOINTING_ON, "the flag owner of attention.0")]
