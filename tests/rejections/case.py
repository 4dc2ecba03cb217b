# SPDX-License-Identifier: Apache-2.0
"""A way to be refused: how to bring it about, and what the message says."""

from __future__ import annotations

import re
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from activation_swap import SwapPolicy, TrainingSetup, registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from activation_swap import Registry
    from activation_swap.errors import Reason


@dataclass(kw_only=True)
class Request:
    """A call of ``apply`` that is to be refused.

    Attributes:
        model: What is passed.
        mode: The mode.
        setup: The set-up.
        policy: The policy.
        around: Context of the call.
        registry: The registry that is asked.
    """

    model: Any
    mode: Any = "attention"
    setup: Any = None
    policy: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    registry: Registry = field(default_factory=lambda: registry)

    def apply(self) -> object:
        """Make the call."""
        return self.registry.apply(self.mode, self.model, setup=self.setup, policy=self.policy)


@dataclass(frozen=True)
class ApplyCase:
    """A refusal of ``apply``.

    Attributes:
        reason: The catalogue entry that is raised.
        name: Unique name, in kebab case.
        arrange: Turns a sound model into a request that is refused.
    """

    reason: Reason
    name: str
    arrange: Callable[[Any], Request]


@dataclass(frozen=True)
class CallCase:
    """A refusal of anything else: a registration, a forward, a verb, a command.

    Attributes:
        reason: The catalogue entry that is raised.
        name: Unique name, in kebab case.
        call: Brings it about; gets a sound model.
    """

    reason: Reason
    name: str
    call: Callable[[Any], object]


def expected_text(name: str) -> str:
    """Return the message that the case of this name is to give."""
    return (MESSAGES / f"{name}.txt").read_text(encoding="utf-8")


def stable_text(error: Exception) -> str:
    """Return a message without what differs from run to run: temporary directories, addresses."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "TEMPORARY", f"{error}\n")
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


MESSAGES = Path(__file__).with_name("messages")
PIPELINE = TrainingSetup(pp_size=2)
EVERYTHING = SwapPolicy(min_bytes=0, keep_last=False)
