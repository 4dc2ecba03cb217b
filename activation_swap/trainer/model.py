# SPDX-License-Identifier: Apache-2.0
"""A causal language model of Transformers with seeded random weights."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from activation_swap.compat.facts import DTYPE_ARGUMENT, EXPERTS_ARGUMENT
from activation_swap.compat.release import installed_release
from activation_swap.errors import Reason
from activation_swap.trainer.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from transformers import PreTrainedModel

    from activation_swap.trainer.config import ModelSection

__all__ = ["build_model", "read_model_config", "reading_model"]

_SOURCE = (
    f"a preset ({', '.join(PRESETS)}), a directory with a Hugging Face config.json, or such a JSON "
    "file, with a model_type that Transformers knows"
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "decoder_sparse_step",
)


def build_model(section: ModelSection, *, device: torch.device, seed: int) -> PreTrainedModel:
    """Build the model on its device, in its dtype, without a copy elsewhere.

    Args:
        section: Which model.
        device: Where the weights are drawn and stay.
        seed: Seed of the weights. Equal seeds give equal bits on equal devices.

    Returns:
        The model in training mode.

    Raises:
        RejectedError: AS404 when the source is no configuration of a model that can be built and
            run here, AS414 when this Transformers release has no choice of experts.
    """
    config = read_model_config(section)
    options = _options(section)
    torch.manual_seed(seed)
    expected = f"a model that runs here with attn_implementation: {section.attn_implementation}"
    with reading_model(section, expected=expected), device:
        # Transformers draws where the context says: 30 billion weights take seconds on a GPU.
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        if device.type != "meta":
            _try(model)
    return model.train()


def read_model_config(section: ModelSection) -> Any:
    """Return the Hugging Face configuration of a model, without the model.

    Raises:
        RejectedError: AS404 when the source is no readable configuration, or has no such field as
            is to be replaced.
    """
    with reading_model(section):
        source = _fields(section.source)
        fields = {**source, **section.overrides}
        kind = CONFIG_MAPPING[fields.pop("model_type")]
    with reading_model(section, expected="fields with values that make up a model"):
        config = kind.from_dict(fields)
        _check_names(section.overrides.keys() - source.keys(), config)
        if problems := "; ".join(_problems(config)):
            raise ValueError(problems)
        return config


@contextmanager
def reading_model(section: ModelSection, *, expected: str = _SOURCE) -> Iterator[None]:
    """Turn what an unfit configuration raises inside of the block into AS404.

    Args:
        section: Which model the block reads, builds or runs.
        expected: What would have been accepted.

    Raises:
        RejectedError: AS404.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # the configuration is right; it is the device that is small
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        changed = f", with overrides {section.overrides}" if section.overrides else ""
        raise Reason.UNREADABLE_MODEL.error(
            # Transformers may list all that it knows.
            found=shorten(f"{type(error).__name__}: {error}", width=300, placeholder=" ..."),
            where=f"model.source: {section.source}{changed}",
            expected=expected,
        ) from error


@torch.no_grad()
def _try(model: PreTrainedModel) -> None:
    """Run two tokens through a model: many a value shows only there that it cannot be."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    # Without dropout, which would draw numbers.
    model.eval()(input_ids=tokens, labels=tokens, use_cache=False).loss.item()


def _check_names(names: Collection[str], config: Any) -> None:
    """Refuse names that became attributes of this configuration without being fields of its class.

    Transformers takes any name. One that it understands without having it, such as the
    ``rope_theta`` of older files, becomes no attribute.
    """
    # Published files have fields that models read and classes do not declare: `head_dim`.
    published = PRESETS["qwen3-30b-a3b"]
    known = {*vars(type(config)()), *config.attribute_map, *published}
    if strangers := sorted((vars(config).keys() & names) - known):
        msg = f"{type(config).__name__} has no {', '.join(strangers)}"
        raise ValueError(msg)


def _problems(config: Any) -> Iterator[str]:
    """Yield what torch would take without a word, or refuse in a forward only."""
    for name in _SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            yield f"{name} is {size}, and not at least 1"
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}, and not finite"
        if "dropout" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            yield f"{name} is {value}, and not a probability"
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if heads and groups is not None and (groups < 1 or heads % groups):
        yield f"{heads} attention heads cannot share {groups} key-value heads evenly"
    experts = getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if experts and chosen is not None and not 1 <= chosen <= experts:
        yield f"num_experts_per_tok is {chosen}, of {experts} experts"


def _options(section: ModelSection) -> dict[str, Any]:
    """Return what ``from_config`` is told, by the names that this Transformers release has."""
    version = Version(installed_release())
    options = {
        DTYPE_ARGUMENT.at(version): getattr(torch, section.dtype),
        "attn_implementation": section.attn_implementation,
    }
    if section.experts_implementation is not None:
        argument = EXPERTS_ARGUMENT.at(version)
        if argument is None:
            raise Reason.NO_EXPERTS_CHOICE.error(
                found=f"{section.experts_implementation} with transformers {version}",
                where="model.experts_implementation",
            )
        options[argument] = section.experts_implementation
    return options


def _fields(source: str) -> Mapping[str, Any]:
    """Return the fields as data: a ``config.json`` may name code, which is never loaded."""
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    text = (path / "config.json" if path.is_dir() else path).read_text("utf-8")
    fields: dict[str, Any] = dict(json.loads(text))
    fields.pop("auto_map", None)
    return fields
