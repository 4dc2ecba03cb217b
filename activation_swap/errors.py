"""Every way this package refuses: one enum member per reason, and the exception classes.

A rejection is a value with a reason and data. ``Reason.X.error(...)`` is the only constructor of
exceptions in the package, so that the catalogue, the tests and the documentation cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

__all__ = [
    "ActivationSwapError",
    "InPlaceChangeError",
    "Reason",
    "RejectedError",
    "SwapStateError",
    "UnsupportedBackendError",
]

_NOTHING_INSTALLED = "nothing was installed"


class ActivationSwapError(Exception):
    """Base of every exception that this package raises.

    Attributes:
        reason: The catalogue entry.
        where: FQN, file or key that the refusal is about, or ``None``.
        found: What was found there.
        expected: What would have been accepted.
        fix: What to do about it.
        trace: Further findings, one line each.
    """

    def __init__(
        self,
        reason: Reason,
        *,
        found: str,
        where: str | None,
        expected: str,
        fix: str,
        trace: tuple[str, ...],
    ) -> None:
        self.reason = reason
        self.found = found
        self.where = where
        self.expected = expected
        self.fix = fix
        self.trace = trace
        super().__init__(self._render())

    def _render(self) -> str:
        spec = self.reason.value
        consequence = f"; {spec.consequence}" if spec.consequence else ""
        lines = [f"{spec.code}: {spec.summary}{consequence}."]
        if self.where is not None:
            lines.append(f"  where:    {self.where}")
        lines.append(f"  found:    {self.found}")
        lines.append(f"  expected: {self.expected}")
        lines.extend(f"  also:     {line}" for line in self.trace)
        lines.append(f"  fix:      {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by reason and data, so that errors cross process boundaries whole."""
        data = {
            "found": self.found,
            "where": self.where,
            "expected": self.expected,
            "fix": self.fix,
            "trace": self.trace,
        }
        return _rebuild, (self.reason, data)


class RejectedError(ActivationSwapError, ValueError):
    """The model, the set-up or a value is not one that this release supports."""


class UnsupportedBackendError(ActivationSwapError, NotImplementedError):
    """Another back end than PyTorch was asked for."""


class SwapStateError(ActivationSwapError, RuntimeError):
    """A step was asked for that the state of the swap does not allow."""


class InPlaceChangeError(ActivationSwapError, RuntimeError):
    """A saved tensor was changed in place before its copy was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonSpec:
    """What the catalogue knows of one reason.

    Attributes:
        code: Permanent code. AS1xx registry, AS2xx compat, AS3xx install, AS4xx configuration,
            AS5xx schedule, AS6xx run time.
        kind: Exception class to raise.
        summary: One sentence without a full stop.
        expected: What would have been accepted.
        fix: What to do.
        consequence: What did not happen.
    """

    code: str
    kind: type[ActivationSwapError]
    summary: str
    expected: str
    fix: str
    consequence: str = _NOTHING_INSTALLED


@unique
class Reason(Enum):
    """The closed catalogue of refusals."""

    _value_: ReasonSpec

    UNKNOWN_MODE = ReasonSpec(
        code="AS101",
        kind=RejectedError,
        summary="unknown activation_swap mode",
        expected="activation_swap: none | attention",
        fix="set activation_swap to one of the expected values",
    )
    NOT_A_TORCH_MODULE = ReasonSpec(
        code="AS102",
        kind=UnsupportedBackendError,
        summary="the model is not a torch.nn.Module",
        expected="a torch.nn.Module, or a sequence of them under pipeline parallelism",
        fix="pass the PyTorch model; other frameworks are not implemented",
    )
    OTHER_BACKEND = ReasonSpec(
        code="AS103",
        kind=UnsupportedBackendError,
        summary="the training back end is not implemented",
        expected="backend='pytorch'",
        fix="train with PyTorch, or set activation_swap: none",
    )
    NO_ADAPTER = ReasonSpec(
        code="AS104",
        kind=RejectedError,
        summary="no adapter is registered for this model class",
        expected="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
        fix="pass a supported model, or register an adapter for this class",
    )
    ALREADY_SWAPPED = ReasonSpec(
        code="AS301",
        kind=RejectedError,
        summary="a module of the model is swapped by another installation",
        expected="modules that no live Swap owns, or the same model, set-up and policy again",
        fix="call remove() on the live Swap first",
    )
    CHECKPOINTING_ENABLED_LATER = ReasonSpec(
        code="AS601",
        kind=RejectedError,
        summary="gradient checkpointing was turned on for a swapped attention",
        expected="gradient checkpointing off for every layer with swapped attention",
        fix="turn gradient checkpointing off, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    COMPILED_LATER = ReasonSpec(
        code="AS602",
        kind=RejectedError,
        summary="a swapped model was compiled",
        expected="an eager model: saved-tensor hooks and graph compilation do not mix",
        fix="train without torch.compile, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    SAVED_TENSOR_CHANGED = ReasonSpec(
        code="AS603",
        kind=InPlaceChangeError,
        summary="a tensor saved for backward was changed in place",
        expected="the tensor unchanged until its device-to-host copy is complete",
        fix="do not modify the tensor in place, or clone it first",
        consequence="the backward was stopped",
    )
    ILLEGAL_TRANSITION = ReasonSpec(
        code="AS604",
        kind=SwapStateError,
        summary="a saved-tensor group was asked for an impossible step",
        expected="recording > offloading > offloaded > reloading > resident",
        fix="report this as a bug with the calls that led to it",
        consequence="the step was not taken",
    )

    def error(
        self,
        *,
        found: str,
        where: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
        trace: tuple[str, ...] = (),
    ) -> ActivationSwapError:
        """Build the exception of this reason.

        Args:
            found: What was found, with its value or type.
            where: FQN, file or key.
            expected: Overrides the catalogue's text where the case knows better.
            fix: Overrides the catalogue's text where the case knows better.
            trace: Further findings, one line each.

        Returns:
            An instance of the reason's exception class, to be raised by the caller.
        """
        spec = self.value
        return spec.kind(
            self,
            found=found,
            where=where,
            expected=spec.expected if expected is None else expected,
            fix=spec.fix if fix is None else fix,
            trace=trace,
        )


def _rebuild(reason: Reason, data: dict[str, Any]) -> ActivationSwapError:
    return reason.error(**data)
