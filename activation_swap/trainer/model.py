# SPDX-License-Identifier: Apache-2.0
"""A causal language model of Transformers with seeded random weights."""

from __future__ import annotations

import json
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


def build_model(section: ModelSection, *, device: torch.device, seed: int) -> PreTrainedModel:
    """Build the model on its device, in its dtype, without a copy elsewhere.

    Args:
        section: Which model.
        device: Where the weights are drawn and stay.
        seed: Seed of the weights. Equal seeds give equal bits on equal devices.

    Returns:
        The model in training mode.

    Raises:
        RejectedError: AS404 when the source is no configuration of a model that can be built here,
            AS414 when this Transformers release has no choice of experts.
    """
    config = read_model_config(section)
    options = _options(section)
    torch.manual_seed(seed)
    with reading_model(section), device:
        # Transformers draws where the context says: 30 billion weights take seconds on a GPU.
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
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
        config = CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
        _check_names(section.overrides.keys() - source.keys(), config)
        _check_heads(config)
        return config


@contextmanager
def reading_model(section: ModelSection) -> Iterator[None]:
    """Turn what an unfit configuration raises inside of the block into AS404.

    Args:
        section: Which model the block reads or builds.

    Raises:
        RejectedError: AS404.
    """
    try:
        yield
    except (
        OSError,
        ImportError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise Reason.UNREADABLE_MODEL.error(
            # Transformers may list all that it knows.
            found=shorten(f"{type(error).__name__}: {error}", width=300, placeholder=" ..."),
            where=f"model.source: {section.source}",
            expected=f"a preset ({', '.join(PRESETS)}), a directory with a Hugging Face "
            "config.json, or such a JSON file, with a model_type that Transformers knows",
        ) from error


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


def _check_heads(config: Any) -> None:
    """Refuse heads that do not share their keys and values evenly: torch would, in a forward."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if heads and groups is not None and (groups < 1 or heads % groups):
        msg = f"{heads} attention heads cannot share {groups} key-value heads evenly"
        raise ValueError(msg)


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
