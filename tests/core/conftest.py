# SPDX-License-Identifier: Apache-2.0
"""What the tests of the core watch."""

from __future__ import annotations

from typing import Any

import pytest

from activation_swap.core.engine import Engine


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Collect the addresses of all storages that are offloaded."""
    addresses: set[int] = set()
    # Held to the end of the test, so that none of the addresses becomes another storage's.
    held: list[Any] = []
    launch = Engine._offload

    def spy(self: Engine, group: Any, storages: Any) -> bool:
        held.extend(s.aliases[0][0].untyped_storage() for s in storages)
        addresses.update(s.aliases[0][0].untyped_storage().data_ptr() for s in storages)
        return launch(self, group, storages)

    monkeypatch.setattr(Engine, "_offload", spy)
    return addresses
