# SPDX-License-Identifier: Apache-2.0
"""The YAML file of a run: strict, frozen pydantic models, read without executing anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from activation_swap import Mode  # noqa: TC001 - pydantic reads it
from activation_swap.errors import Reason
from activation_swap.trainer.plain_yaml import load_plain_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AdamWSection",
    "CheckpointSection",
    "CompareSection",
    "Config",
    "DataSection",
    "ModelSection",
    "SGDSection",
    "load_config",
    "parse_config",
]

# YAML 1.1 reads `1e-4` (no dot) as a string, so numbers that people write that way are not strict.
_Rate = Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(strict=False, ge=0, lt=1)]
_Count = Annotated[int, Field(ge=1, lt=2**63)]
_THREADS = 4096  # more than any machine has; torch and OpenMP fail in many ways from some number on
_NESTED = "sections nest in the file; a.b=VALUE is for --set"


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ModelSection(_Section):
    """Which model is trained. Weights are random and depend on the seed alone.

    Attributes:
        source: A preset (``tiny``, ``qwen3-30b-a3b``), a directory with a Hugging Face
            ``config.json``, or such a JSON file.
        overrides: Fields of the Hugging Face configuration to replace, but for those that have a
            key here.
        dtype: Type of weights, activations and gradients.
        attn_implementation: Attention function of Transformers.
        experts_implementation: Experts function of Transformers, or ``None`` for its own choice.
    """

    source: str = "tiny"
    overrides: dict[str, int | float | bool | str | None] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm"] | None = None

    @field_validator("overrides")
    @classmethod
    def _without_what_has_a_key(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        # Hugging Face knows some of them by a second name, or as a private attribute.
        for name in overrides:
            key = name.lstrip("_").removeprefix("torch_")
            if key in cls.model_fields:
                msg = f"model.{key} in place of the override {name}"
                raise ValueError(msg)
        return overrides


class DataSection(_Section):
    """Which text is read, in sorted order, again from the start when it ends.

    Attributes:
        files: Paths or glob patterns (``**`` included), taken literally: neither ``~`` nor
            variables are expanded. ``None`` reads the standard library of the running Python.
        tokenizer: Directory of a Hugging Face tokenizer, or ``None`` for bytes as tokens.
    """

    files: tuple[str, ...] | None = Field(default=None, min_length=1)
    tokenizer: Path | None = None


class AdamWSection(_Section):
    """AdamW after backward. Keeps two moments per weight in the dtype of the weight.

    Attributes:
        name: ``adamw``.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        weight_decay: Decoupled weight decay.
    """

    name: Literal["adamw"] = "adamw"
    lr: _Rate = 3e-4
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(strict=False, ge=0, allow_inf_nan=False)] = 0.0


class SGDSection(_Section):
    """SGD applied inside backward: each gradient is used and freed as soon as it is complete.

    Attributes:
        name: ``sgd_in_backward``.
        lr: Learning rate.
    """

    name: Literal["sgd_in_backward"]
    lr: _Rate = 1e-3


def _optimizer_name(section: Any) -> Any:
    """Tell the sections apart; the one without a name is of the default optimizer."""
    if isinstance(section, dict):
        name = section.get("name", "adamw")
        return name if isinstance(name, str) else None
    return getattr(section, "name", None)


_Optimizer = Annotated[
    Annotated[AdamWSection, Tag("adamw")] | Annotated[SGDSection, Tag("sgd_in_backward")],
    Discriminator(
        _optimizer_name,
        custom_error_type="optimizer_name",
        custom_error_message="a section with name: adamw | sgd_in_backward",
    ),
]


class CheckpointSection(_Section):
    """When ``train`` saves, below ``output/checkpoints``.

    Attributes:
        every: Steps from one checkpoint to the next; the last step is saved too. ``None`` saves
            nothing.
        keep: How many complete checkpoints are kept.
    """

    every: _Count | None = None
    keep: _Count = 2


class CompareSection(_Section):
    """The steps that ``compare`` runs in each mode, in this order.

    Attributes:
        digest_steps: Steps whose every gradient is fingerprinted. They are not timed.
        warmup_steps: Steps that are neither fingerprinted nor timed.
        timed_steps: Steps that are timed, and over which bytes and memory are counted.
        repeat_baseline: Run ``none`` twice, to tell whether this model and device repeat their
            own bits at all.
    """

    digest_steps: _Count = 4
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    timed_steps: _Count = 8
    repeat_baseline: bool = False


class Config(_Section):
    """Everything a run depends on.

    Attributes:
        activation_swap: ``none`` or ``attention``.
        device: ``auto`` (the accelerator, else the CPU) or a torch device.
        batch_size: Sequences per microbatch.
        sequence_length: Tokens per sequence.
        gradient_accumulation: Microbatches per step, one after the other.
        pp_size: Pipeline ranks. Above 1, the run is started with torchrun; further ranks shard each
            stage with FSDP2.
        microbatches: Microbatches per step that are in the pipeline together.
        schedule: Name of a schedule of ``torch.distributed.pipelining``.
        steps: Steps of ``train``, counted from the first run on.
        seed: Seed of the weights.
        cpu_threads: Threads of a computation on the CPU, at most 4,096; ``None`` leaves it to
            torch. More than the free cores makes each step many times slower.
        deterministic: Ask torch for deterministic algorithms alone; what has none raises. Slower.
        output: Directory of everything that a run writes.
        model: See :class:`ModelSection`.
        data: See :class:`DataSection`.
        optimizer: See :class:`AdamWSection` and :class:`SGDSection`.
        checkpoint: See :class:`CheckpointSection`.
        compare: See :class:`CompareSection`.
    """

    activation_swap: Mode = "none"
    device: str = "auto"
    batch_size: _Count = 2
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    gradient_accumulation: _Count = 1
    pp_size: _Count = 1
    microbatches: _Count = 1
    schedule: str = "1F1B"
    steps: _Count = 20
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    cpu_threads: Annotated[int, Field(ge=1, le=_THREADS)] | None = None
    deterministic: bool = False
    output: Path = Path("out/run")
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: _Optimizer = AdamWSection()
    checkpoint: CheckpointSection = CheckpointSection()
    compare: CompareSection = CompareSection()

    @model_validator(mode="after")
    def _one_update_per_step(self) -> Config:
        # SGD inside backward updates after each microbatch, so that the next one would see other
        # weights: that is not accumulation.
        if self.optimizer.name == "sgd_in_backward" and self.gradient_accumulation > 1:
            msg = "gradient_accumulation above 1 needs optimizer.name: adamw"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _what_a_pipeline_supports(self) -> Config:
        limits = {
            "microbatches above 1 needs pp_size above 1; see gradient_accumulation": (
                self.pp_size == 1 and self.microbatches > 1
            ),
            "pp_size above 1 needs gradient_accumulation: 1; see microbatches": (
                self.pp_size > 1 and self.gradient_accumulation > 1
            ),
            "pp_size above 1 needs optimizer.name: adamw": (
                self.pp_size > 1 and self.optimizer.name != "adamw"
            ),
            "checkpoint.every needs pp_size: 1": (
                self.pp_size > 1 and self.checkpoint.every is not None
            ),
        }
        for msg, broken in limits.items():
            if broken:
                raise ValueError(msg)
        return self

    def trajectory(self) -> dict[str, Any]:
        """Return, as JSON data, the values that decide the numbers of a run.

        Where they run, how long, and what is swapped is not among them.
        """
        elsewhere = {"activation_swap", "device", "steps", "output", "checkpoint", "compare"}
        data: dict[str, Any] = self.model_dump(mode="json", exclude=elsewhere)
        return data


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file.

    Args:
        path: The file.
        overrides: ``key=value`` or ``section.key=value``, applied on top; values are YAML.

    Returns:
        The checked configuration.

    Raises:
        RejectedError: AS402 when the file cannot be read as a YAML mapping or an override cannot be
            applied, AS401 when a key or a value is not legal.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            raw = load_plain_yaml(file)
        raw = {} if raw is None else raw
        for override in overrides:
            where = f"--set {override}"
            _override(raw, override)
    except (OSError, yaml.YAMLError, ValueError, TypeError) as error:
        raise Reason.UNREADABLE_CONFIG.error(
            found=f"{type(error).__name__}: {error}", where=where
        ) from error
    return parse_config(raw, where=str(path))


def parse_config(raw: Any, *, where: str = "config") -> Config:
    """Check what a YAML file or a checkpoint holds.

    Args:
        raw: Plain data, as ``load_plain_yaml`` returns it. A section without content has its
            defaults.
        where: Name of the source, for messages.

    Returns:
        The checked configuration.

    Raises:
        RejectedError: AS401, naming the key, the value and what is legal.
    """
    if isinstance(raw, dict):
        raw = {key: value for key, value in raw.items() if value is not None or not _section(key)}
    try:
        # In JSON a list may become a tuple and a string a path, while all else stays strict.
        return Config.model_validate_json(json.dumps(raw))
    except (TypeError, ValueError, RecursionError) as error:
        (key, found, expected), *others = _findings(error, raw)
        raise Reason.INVALID_CONFIG.error(
            found=found,
            where=f"{where}: {key}" if key else where,
            expected=expected,
            trace=tuple(f"{key}: {found}; expected {expected}" for key, found, expected in others),
        ) from error


def _override(raw: Any, override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        msg = f"override {override!r} is not key=value"
        raise TypeError(msg)
    *sections, name = key.split(".")
    section, path = raw, "the file"
    for part in sections:
        inner = _mapping(section, path).get(part)
        section[part] = section = {} if inner is None else inner
        path = part
    _mapping(section, path)[name] = load_plain_yaml(value)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        msg = f"{name} holds {value!r}, and no keys"
        raise TypeError(msg)
    return value


def _findings(error: Exception, raw: Any) -> list[tuple[str, str, str]]:
    """Return key, what was found and what is legal, one by one."""
    if isinstance(error, ValidationError):
        return [_describe(details, raw) for details in error.errors()]
    # Of json, which takes no other type and nothing that holds itself.
    return [("", str(error), "mappings, lists, text, numbers, true, false and null")]


def _describe(details: Mapping[str, Any], raw: Any) -> tuple[str, str, str]:
    """Return key, what was found and what is legal, from one of pydantic's findings."""
    parts: list[str] = []
    node = raw
    for part in details["loc"]:
        inside = range(len(node)) if isinstance(node, list) else node
        # A part that is not in the file is the tag of a union.
        if isinstance(inside, dict | range) and part in inside:
            node = node[part]
            parts.append(str(part))
    key = ".".join(parts)
    found = f"{parts[-1]}: {details['input']!r}" if parts else repr(details["input"])
    match details["type"]:
        case "extra_forbidden":
            legal = f"one of {', '.join(sorted(_keys(details['loc'][:-1])))}"
            return key, f"unknown key {key!r}", f"{legal}; {_NESTED}" if "." in parts[-1] else legal
        case "literal_error":
            return key, found, details["ctx"]["expected"].replace("'", "").replace(" or ", " | ")
        case "model_type" | "dict_type":
            return key, found, "a mapping: keys with values"
        case _:
            return key, found, details["msg"].removeprefix("Value error, ")


def _section(key: Any) -> bool:
    """Whether a key of the top level holds keys itself."""
    field = Config.model_fields.get(key)
    return field is not None and isinstance(field.default, _Section)


def _keys(place: Sequence[Any]) -> list[str]:
    """Return the legal keys of the section at a place that pydantic names."""
    section: Any = Config
    for part in place:
        tagged = {tag.tag: member for member, tag in map(get_args, get_args(section))}
        section = tagged[part] if tagged else section.model_fields[part].annotation
    return list(section.model_fields)
