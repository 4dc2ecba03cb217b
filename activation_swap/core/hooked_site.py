# SPDX-License-Identifier: Apache-2.0
"""A site as its hooks know it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from activation_swap._site import Site

__all__ = ["HookedSite"]


class HookedSite:
    """A site whose modules are known weakly, since a module holds its hooks.

    So a swapped model dies with its last user, and does not wait for the garbage collector.

    Attributes:
        fqn: As in :class:`~activation_swap._site.Site`; likewise ``cache_arguments``, ``stage``
            and ``returns``.
        module: Weak reference to the module.
        called: Weak references to the owners and the module: ``.compile()`` of any is refused.
        checkpoint_flag_owner: Weak reference to it, or ``None`` where there is none.
    """

    __slots__ = (
        "cache_arguments",
        "called",
        "checkpoint_flag_owner",
        "fqn",
        "module",
        "returns",
        "stage",
    )

    def __init__(self, site: Site) -> None:
        owner = site.checkpoint_flag_owner
        self.fqn = site.fqn
        self.cache_arguments = site.cache_arguments
        self.stage = site.stage
        self.returns = site.returns
        self.module = ref(site.module)
        self.called = (*map(ref, site.owners), self.module)
        self.checkpoint_flag_owner = None if owner is None else ref(owner)
