# SPDX-License-Identifier: Apache-2.0
"""``activation-swap check``: would attention swap work here? What to paste into a bug report."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers

import activation_swap
from activation_swap import SwapPolicy, registry
from activation_swap.compat.canary import tiny_model
from activation_swap.compat.release import installed_release, read_release
from activation_swap.core.host_memory import host_headroom
from activation_swap.core.link import transfer_for
from activation_swap.errors import ActivationSwapError
from activation_swap.testing import compare_runs
from activation_swap.trainer.device import determinism, resolve_device
from activation_swap.trainer.link_probe import LinkRates, probe_link

if TYPE_CHECKING:
    import argparse

    from activation_swap._check import Check
    from activation_swap.testing import Comparison

__all__ = ["CheckReport", "FactResult", "HostMemory", "SelfTest", "add_arguments", "check", "run"]

_MIB = 1024 * 1024
_STEPS = 3
_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """What the pinned pool would meet.

    Attributes:
        headroom_bytes: Bytes left under the limits of this process, ``None`` without a limit.
        slab_bytes: Size of the one slab that was asked for.
        failure: Why it could not be had, or ``None``.
    """

    headroom_bytes: int | None
    slab_bytes: int
    failure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FactResult:
    """One check of a small model that the installed Transformers built.

    Attributes:
        subject: What was looked at.
        expected: What is right.
        found: What was found.
        code: Code of the refusal, or ``None`` when the check passed.
    """

    subject: str
    expected: str
    found: str
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """The same small training without and with the swap, compared bit by bit.

    Attributes:
        steps: Training steps of each run.
        bits_equal: Whether every loss, gradient and weight is the same.
        first_difference: The first one that is not, or ``None``.
        repeats: Whether two trainings without the swap have equal bits; ``True`` unless found
            otherwise. If not, a difference tells nothing, and the bytes decide.
        offloaded_bytes: Bytes that went to the host.
        reloaded_bytes: Bytes that came back.
        failure: The error that stopped it, or ``None``.
    """

    steps: int = _STEPS
    bits_equal: bool = False
    first_difference: str | None = None
    repeats: bool = True
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it ran, moved bytes both ways and changed no bit."""
        bits_kept = self.bits_equal or not self.repeats
        return bits_kept and self.offloaded_bytes > 0 and self.reloaded_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Everything that the command found.

    Attributes:
        versions: By name.
        device: Name of the device.
        device_bytes: Its memory, or ``None`` for a CPU.
        link: Rates between device and host in bytes per second, or ``None`` for a CPU.
        host_memory: See :class:`HostMemory`.
        facts: What the package relies on, checked on a live model.
        self_test: See :class:`SelfTest`; ``None`` when a fact does not hold.
    """

    versions: dict[str, str]
    device: str
    device_bytes: int | None
    link: LinkRates | None
    host_memory: HostMemory
    facts: tuple[FactResult, ...]
    self_test: SelfTest | None

    @property
    def works(self) -> bool:
        """Whether attention swap would work here."""
        return (
            self.host_memory.failure is None
            and all(fact.code is None for fact in self.facts)
            and self.self_test is not None
            and self.self_test.passed
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("--device", default="auto", help="default: the accelerator, else the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check and print; the exit code is 0 only if attention swap would work here."""
    report = check(arguments.device)
    if arguments.json:
        sys.stdout.write(json.dumps({"works": report.works, **asdict(report)}, indent=2) + "\n")
    else:
        sys.stdout.write(_text(report))
    return 0 if report.works else 1


def check(device_name: str = "auto") -> CheckReport:
    """Look at this machine and at the installed libraries.

    Args:
        device_name: ``auto``, or what ``torch.device`` takes.

    Returns:
        What was found.

    Raises:
        RejectedError: AS403 when there is no such device here.
    """
    device = resolve_device(device_name)
    host_memory = _probe_host_memory(device)
    facts = tuple(map(_fact, _explain()))
    name, nbytes = _describe(device)
    return CheckReport(
        versions={
            "activation_swap": activation_swap.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "platform": platform.platform(),
        },
        device=name,
        device_bytes=nbytes,
        link=probe_link(device_name) if host_memory.failure is None else None,
        host_memory=host_memory,
        facts=facts,
        self_test=None if any(fact.code for fact in facts) else _self_test(device),
    )


def _explain() -> tuple[Check, ...]:
    version, release = read_release(installed_release())
    # A release without Qwen3-MoE cannot build the model either.
    return (release,) if version is None else registry.explain(tiny_model()).checks


def _fact(result: Check) -> FactResult:
    rejection = result.rejection
    return FactResult(
        subject=result.subject,
        expected=result.expected,
        found=result.found,
        code=None if rejection is None else rejection.code,
    )


def _describe(device: torch.device) -> tuple[str, int | None]:
    if device.type == "cpu":
        return "cpu", None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


def _probe_host_memory(device: torch.device) -> HostMemory:
    slab_bytes, failure = SwapPolicy().slab_bytes, None
    try:
        transfer_for(torch.empty(0, device=device).device).allocate_slab(slab_bytes)
    except RuntimeError as error:
        failure = str(error)
    return HostMemory(headroom_bytes=host_headroom(), slab_bytes=slab_bytes, failure=failure)


def _self_test(device: torch.device) -> SelfTest:
    try:
        comparison = _compare(device)
    except (ActivationSwapError, RuntimeError) as error:
        return SelfTest(failure=f"{type(error).__name__}: {error}")
    return SelfTest(
        bits_equal=comparison.first_difference is None,
        first_difference=comparison.first_difference,
        repeats=comparison.repeats,
        offloaded_bytes=comparison.stats.offloaded_bytes,
        reloaded_bytes=comparison.stats.reloaded_bytes,
    )


def _compare(device: torch.device) -> Comparison:
    """Train in bf16, so that what crosses the link narrowed is compared, too."""
    tokens = (torch.arange(2 * _TOKENS, device=device) % 64).reshape(2, _TOKENS)

    def loss(model: Any) -> torch.Tensor:
        value: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    compare = partial(compare_runs, partial(_build, device), loss, steps=_STEPS)
    try:
        with determinism(enabled=True):
            return compare()
    except ActivationSwapError:
        raise
    except RuntimeError:
        # Maybe an operation has no deterministic algorithm here. Then `repeats` tells whose a
        # difference is; and any other error comes again.
        return compare()


def _build(device: torch.device) -> Any:
    return tiny_model().to(device=device, dtype=torch.bfloat16)


def _text(report: CheckReport) -> str:
    verdict = "attention swap works here" if report.works else "attention swap does not work here"
    memory = report.host_memory
    room = "" if memory.headroom_bytes is None else f", {_mib(memory.headroom_bytes)} allowed"
    slab = "was had" if memory.failure is None else f"could not be had: {memory.failure}"
    rows = [
        ("versions", ", ".join(f"{name} {text}" for name, text in report.versions.items())),
        ("device", _device_text(report)),
        ("link", _link_text(report.link)),
        ("host memory", f"a pinned slab of {_mib(memory.slab_bytes)} {slab}{room}"),
        ("facts", _facts_text(report.facts)),
        ("self-test", _self_test_text(report.self_test)),
    ]
    lines = [f"activation_swap: {verdict}", *(f"  {name:<13}{text}" for name, text in rows)]
    return "\n".join(lines) + "\n"


def _device_text(report: CheckReport) -> str:
    return report.device + ("" if report.device_bytes is None else f", {_mib(report.device_bytes)}")


def _link_text(link: LinkRates | None) -> str:
    if link is None:
        return "not measured: there is none, or no pinned memory"
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in asdict(link).items())
    return f"{rates} (both: each way while the other runs)"


def _facts_text(facts: tuple[FactResult, ...]) -> str:
    holding = [fact for fact in facts if fact.code is None]
    lines = [f"{len(holding)} of {len(facts)} hold"]
    lines += (
        f"{'':<15}{fact.code} {fact.subject}: found {fact.found}, expected {fact.expected}"
        for fact in facts
        if fact.code is not None
    )
    return "\n".join(lines)


def _self_test_text(test: SelfTest | None) -> str:
    if test is None:
        return "not run: a fact does not hold"
    if test.failure is not None:
        return f"failed: {test.failure}"
    bits = "bits equal" if test.bits_equal else f"bits differ: {test.first_difference}"
    if not test.repeats:
        bits += "; and so without the swap: this device does not repeat its own bits"
    moved = f"{test.offloaded_bytes} bytes out, {test.reloaded_bytes} bytes back"
    if test.reloaded_bytes < test.offloaded_bytes:
        moved += " (backward found the rest still on the device)"
    return f"{test.steps} steps each way: {bits}; {moved}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB"
