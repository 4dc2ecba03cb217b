# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in Transformers' Qwen3-MoE, by release.

One table for each fact, since they change independently. A row says which releases it holds for,
the value, what changed upstream, and when the row may be deleted. This is the only place that
compares versions. The probe confirms each value on the live model, so that a wrong row refuses a
model and never trains a wrong one. The last two say how the reference trainer builds a model; there
a wrong row fails before there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = [
    "ATTENTION_CLASS",
    "ATTENTION_PARTS",
    "ATTENTION_SIGNATURE",
    "CACHE_ARGUMENTS",
    "CHECKPOINT_FLAG",
    "CHECKPOINT_SITE",
    "DTYPE_ARGUMENT",
    "EXPERTS_ARGUMENT",
    "FACTS",
    "LAYER_CLASS",
    "LAYER_CONTAINER",
    "MODEL_CLASS",
    "RETURN_ARITY",
    "STACK_CLASS",
    "SUPPORTED",
    "TESTED",
    "CheckpointFlag",
    "CheckpointSite",
    "Fact",
    "Row",
    "spelled",
]

Value = TypeVar("Value")

MODEL_CLASS: Final = "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM"
"""The class that the adapter is registered for; the key of everything below."""
CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "past_key_value")
"""Names that the attention's cache argument has had: see the rows of ``ATTENTION_SIGNATURE``."""

# `.dev0` bounds, since a development version and a release candidate sort before their release:
# 5.24.0.dev0 and 5.24.0rc1 belong to 5.24's row, not to 5.23's.
SUPPORTED: Final = SpecifierSet(">=4.51.dev0")
TESTED: Final = SpecifierSet(">=4.51.dev0,<5.25.dev0")
"""Releases that the version matrix has run. Newer ones are tried with the newest rows."""


def spelled(versions: SpecifierSet) -> str:
    """Return a range as people write it, lower end first."""
    return ", ".join(sorted(map(str, versions), reverse=True))


class CheckpointSite(StrEnum):
    """Which call gradient checkpointing wraps. It decides what runs again in backward."""

    MODEL_LOOP = "the model's loop over its layers"
    LAYER_CALL = "GradientCheckpointingLayer.__call__"
    LAYER_FORWARD = "the layer's forward, rewritten in __init_subclass__"


class CheckpointFlag(StrEnum):
    """Which module's ``gradient_checkpointing`` says whether a layer is recomputed."""

    STACK = "the model without head"
    LAYER = "the decoder layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Generic[Value]):
    """One value of a fact.

    Attributes:
        versions: Releases that it holds for; disjoint from the other rows, without gaps.
        value: What holds.
        changed: What upstream changed to make it so.
        delete_when: When the row may go.
    """

    versions: SpecifierSet
    value: Value
    changed: str
    delete_when: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact(Generic[Value]):
    """Something that this package relies on.

    Attributes:
        name: Its name in messages and in the documentation.
        rows: Its values, oldest release first.
    """

    name: str
    rows: tuple[Row[Value], ...]

    def at(self, version: Version) -> Value:
        """Return the value at a supported ``version``; the newest row has no upper end."""
        return next(
            row.value for row in self.rows if row.versions.contains(version, prereleases=True)
        )


def _constant(name: str, value: Value) -> Fact[Value]:
    row = Row(
        versions=SUPPORTED,
        value=value,
        changed="so since Qwen3-MoE was added in 4.51",
        delete_when="never: it holds for every release",
    )
    return Fact(name=name, rows=(row,))


STACK_CLASS: Final = _constant(
    "class of the model without head",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeModel",
)
LAYER_CLASS: Final = _constant(
    "class of the decoder layers",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",
)
ATTENTION_CLASS: Final = _constant(
    "class of the attention",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention",
)
LAYER_CONTAINER: Final = _constant(
    "container of the decoder layers", "torch.nn.modules.container.ModuleList"
)
ATTENTION_PARTS: Final = _constant(
    "parts of the attention", ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
RETURN_ARITY: Final = _constant("length of the tuple that the attention returns", 2)

ATTENTION_SIGNATURE: Final = Fact(
    name="signature of the attention's forward",
    rows=(
        Row(
            versions=SpecifierSet(">=4.51.dev0,<4.56.dev0"),
            value=(
                "(self, hidden_states, position_embeddings, attention_mask, "
                "past_key_value=None, cache_position=None, **kwargs)"
            ),
            changed="so since Qwen3-MoE was added in 4.51",
            delete_when="4.55 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=4.56.dev0,<5.4.dev0"),
            value=(
                "(self, hidden_states, position_embeddings, attention_mask, "
                "past_key_values=None, cache_position=None, **kwargs)"
            ),
            changed="past_key_value was renamed to past_key_values",
            delete_when="5.3 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=5.4.dev0,<5.24.dev0"),
            value=(
                "(self, hidden_states, position_embeddings, attention_mask, "
                "past_key_values=None, **kwargs)"
            ),
            changed="cache_position was removed",
            delete_when="5.23 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=5.24.dev0"),
            value=(
                "(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs)"
            ),
            changed="past_key_values was renamed to cache",
            delete_when="a newer row exists and 5.24 is no longer supported",
        ),
    ),
)

CHECKPOINT_SITE: Final = Fact(
    name="call that gradient checkpointing wraps",
    rows=(
        Row(
            versions=SpecifierSet(">=4.51.dev0,<4.53.dev0"),
            value=CheckpointSite.MODEL_LOOP,
            changed="so since Qwen3-MoE was added in 4.51",
            delete_when="4.52 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=4.53.dev0,<5.23.dev0"),
            value=CheckpointSite.LAYER_CALL,
            changed="the decoder layer became a GradientCheckpointingLayer",
            delete_when="5.22 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=5.23.dev0"),
            value=CheckpointSite.LAYER_FORWARD,
            changed="GradientCheckpointingLayer wraps forward, so that hooks stay outside",
            delete_when="a newer row exists and 5.24 is no longer supported",
        ),
    ),
)

CHECKPOINT_FLAG: Final = Fact(
    name="owner of the gradient checkpointing flag",
    rows=(
        Row(
            versions=SpecifierSet(">=4.51.dev0,<4.53.dev0"),
            value=CheckpointFlag.STACK,
            changed="so since Qwen3-MoE was added in 4.51",
            delete_when="4.52 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=4.53.dev0"),
            value=CheckpointFlag.LAYER,
            changed="each layer got a flag of its own (every_n_layers sets some of them)",
            delete_when="a newer row exists and 5.24 is no longer supported",
        ),
    ),
)

DTYPE_ARGUMENT: Final = Fact(
    name="name of the argument of from_config for the dtype of the weights",
    rows=(
        Row(
            versions=SpecifierSet(">=4.51.dev0,<4.56.dev0"),
            value="torch_dtype",
            changed="so since Qwen3-MoE was added in 4.51",
            delete_when="4.55 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=4.56.dev0"),
            value="dtype",
            changed="torch_dtype was renamed to dtype",
            delete_when="a newer row exists and 5.24 is no longer supported",
        ),
    ),
)

EXPERTS_ARGUMENT: Final[Fact[str | None]] = Fact(
    name="name of the argument of from_config for the experts' implementation",
    rows=(
        Row(
            versions=SpecifierSet(">=4.51.dev0,<5.dev0"),
            value=None,
            changed="so since Qwen3-MoE was added in 4.51: there is one implementation",
            delete_when="4.57 is no longer supported",
        ),
        Row(
            versions=SpecifierSet(">=5.dev0"),
            value="experts_implementation",
            changed="the experts became one module whose computation can be chosen",
            delete_when="a newer row exists and 5.24 is no longer supported",
        ),
    ),
)

FACTS: Final[tuple[Fact[Any], ...]] = (
    STACK_CLASS,
    LAYER_CLASS,
    ATTENTION_CLASS,
    LAYER_CONTAINER,
    ATTENTION_PARTS,
    ATTENTION_SIGNATURE,
    RETURN_ARITY,
    CHECKPOINT_SITE,
    CHECKPOINT_FLAG,
    DTYPE_ARGUMENT,
    EXPERTS_ARGUMENT,
)
"""All of them, for the tests and the documentation."""
