# SPDX-License-Identifier: Apache-2.0
"""For authors of adapters: a check of everything that the registry relies on, for their tests.

:func:`check_adapter` is one line of a test suite. :func:`compare_runs` is the part of it that
anybody can use on a supported model: train with and without the swap, and compare every bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from activation_swap import _registry
from activation_swap._config import SwapPolicy, TrainingSetup
from activation_swap.compat.classes import original_class, qualified_name
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from activation_swap import Registry
    from activation_swap._site import Site
    from activation_swap._stats import SwapStats
    from activation_swap.adapters import Adapter, Inspection

__all__ = ["Comparison", "check_adapter", "compare_runs"]

_EVERYTHING = SwapPolicy(min_bytes=1, keep_last=False, slab_bytes=1024 * 1024)
_NO_GROUP = "activation_swap.testing.no_entry_points"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs of the same training, without and with the swap.

    Attributes:
        steps: Training steps of each run.
        first_difference: The first loss, gradient or weight that differs in a bit, or ``None``.
        repeats: Whether two runs without the swap have equal bits; looked at after a difference.
        stats: Counters of the swap over all steps.
    """

    steps: int
    first_difference: str | None
    repeats: bool = True
    stats: SwapStats

    @property
    def bits_kept(self) -> bool:
        """Whether the swap changed no bit, as far as a model tells that changes them by itself."""
        return self.first_difference is None or not self.repeats

    @property
    def passed(self) -> bool:
        """Whether the swap changed no bit, and something moved in both directions."""
        return self.bits_kept and self.stats.offloaded_bytes > 0 and self.stats.reloaded_bytes > 0


def compare_runs(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    *,
    steps: int = 3,
    policy: SwapPolicy | None = None,
    registry: Registry | None = None,
) -> Comparison:
    """Train two models of equal weights by SGD, one of them swapped, and compare every bit.

    The random state is the same before each pair of steps, so that dropout draws alike. After a
    difference two models without the swap are compared, too: on an accelerator a model may not
    repeat its own bits, and then only the bytes that moved tell anything.

    Args:
        build: Returns a new model. The weights of the second are set to those of the first.
        loss: Runs the forward of a model and returns its loss, a scalar with a graph.
        steps: Training steps, at least 1.
        policy: What moves. (Default: everything, whatever its size)
        registry: Who applies. (Default: the registry that users import)

    Returns:
        What was compared, with the counters of the swap.

    Raises:
        RejectedError: The model is not supported.
    """
    plain, swapped = _twins(build)
    registry = _registry.registry if registry is None else registry
    swap = registry.apply("attention", swapped, policy=policy or _EVERYTHING)
    try:
        difference = _first_difference(plain, swapped, loss, steps)
        stats = swap.stats()
    finally:
        swap.remove()
    repeats = difference is None or _first_difference(*_twins(build), loss, steps) is None
    return Comparison(steps=steps, first_difference=difference, repeats=repeats, stats=stats)


def check_adapter(
    adapter: Adapter, build: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]
) -> None:
    """Check an adapter against a live model: what it finds, refuses, and that no bit changes.

    Args:
        adapter: The adapter under test. It need not be registered.
        build: Returns a new small model of a class that the adapter serves.
        loss: Runs the forward of a model and returns its loss, a scalar with a graph.

    Raises:
        RejectedError: AS117 with every rule that the adapter breaks; or AS110, when it is no
            adapter at all.
    """
    registry = _registry.Registry((adapter,), entry_point_group=_NO_GROUP)
    # What one step finds would only be said again, less clearly, by those after it.
    for problems in _examine(adapter, registry, build, loss):
        if problems:
            first, *others = problems
            raise Reason.ADAPTER_CONTRACT.error(
                found=first, where=qualified_name(type(adapter)), trace=tuple(others)
            )


def _examine(
    adapter: Adapter,
    registry: Registry,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
) -> Iterator[list[str]]:
    """Yield what each step of the examination finds."""
    model = build().train()
    before = _fingerprint(model)
    yield list(_class_problems(adapter, model))
    inspection = adapter.inspect(model, setup=TrainingSetup())
    yield ["inspect changed the model"] if _fingerprint(model) != before else []
    yield [
        f"the model of build() is refused: {rejection}".replace("\n", ";")
        for rejection in registry.explain(model).rejections
    ]
    yield list(_site_problems(model, inspection))
    yield list(_call_problems(model, inspection.sites, loss))
    yield list(_guard_problems(adapter, build, inspection.sites))
    swap = registry.apply("attention", model, policy=_EVERYTHING)
    torch.autograd.backward(loss(model))
    swap.remove()
    model.zero_grad(set_to_none=True)
    yield ["the model is not as it was after remove()"] if _fingerprint(model) != before else []
    comparison = compare_runs(build, loss, registry=registry)
    if not comparison.bits_kept:
        yield [f"bits differ: {comparison.first_difference}"]
    elif not comparison.passed:
        yield ["nothing moved: the sites save no tensor that may move"]


def _class_problems(adapter: Adapter, model: nn.Module) -> Iterator[str]:
    name = qualified_name(original_class(type(model)))
    if name not in adapter.model_classes:
        yield f"model_classes without {name}, the class that build() returns"


def _site_problems(model: nn.Module, inspection: Inspection) -> Iterator[str]:
    modules = dict(model.named_modules())
    for site in inspection.sites:
        if modules.get(site.fqn) is not site.module:
            yield f"site {site.fqn!r}: the model has another module, or none, of that name"
        callers = [part for part in modules.values() if _calls(part, site.module)]
        missing = [qualified_name(type(part)) for part in callers if part not in site.owners]
        if missing:
            yield f"site {site.fqn!r}: owners without {', '.join(missing)}"
        flagged = [part for part in callers if hasattr(part, "gradient_checkpointing")]
        if flagged and site.checkpoint_flag_owner not in flagged:
            yield f"site {site.fqn!r}: checkpoint_flag_owner is not one of its flagged owners"
    found = [site.module for site in inspection.sites]
    if len(set(found)) != len(found):
        yield "a module is listed as a site twice"
    kinds = {type(module) for module in found}
    for fqn, module in modules.items():
        if type(module) in kinds and module not in found:
            yield f"{fqn!r} is of a site's class, and no site"


def _calls(owner: nn.Module, module: nn.Module) -> bool:
    # A container has no forward of its own: nobody calls it, and nobody compiles it.
    container = type(owner).forward is nn.Module.forward
    return owner is not module and not container and any(m is module for m in owner.modules())


def _call_problems(
    model: nn.Module, sites: tuple[Site, ...], loss: Callable[[nn.Module], torch.Tensor]
) -> Iterator[str]:
    """Run one forward, and compare what is called with what the sites say of it."""
    calls: list[tuple[str, Any]] = []
    handles = [
        site.module.register_forward_hook(
            lambda _, __, output, fqn=site.fqn: calls.append((fqn, output))
        )
        for site in sites
    ]
    try:
        loss(model)
    finally:
        for handle in handles:
            handle.remove()
    called, listed = [fqn for fqn, _ in calls], [site.fqn for site in sites]
    if called != listed:
        yield f"sites {listed}, and a forward calls {called}"
    returns = {site.fqn: site.returns for site in sites}
    for fqn, output in calls:
        length = len(output) if isinstance(output, tuple) else None
        if returns[fqn] not in {None, length}:
            yield f"site {fqn!r}: returns={returns[fqn]}, and it returned {length or 'no tuple'}"


def _guard_problems(
    adapter: Adapter, build: Callable[[], nn.Module], sites: tuple[Site, ...]
) -> Iterator[str]:
    """Put a foreign module in place of each site, which the adapter must not take for its own."""
    for site in sites:
        model = build().train()
        parent, _, child = site.fqn.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
        inspection = adapter.inspect(model, setup=TrainingSetup())
        if all(check.passed for check in inspection.checks):
            yield f"site {site.fqn!r}: with an nn.Identity in its place no check refuses"


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Identify everything that somebody could change on a model."""
    return {
        name: (
            type(module),
            {key: id(value) for key, value in vars(module).items()},
            {
                key: [(inner, id(item)) for inner, item in value.items()]
                for key, value in vars(module).items()
                if isinstance(value, dict)
            },
        )
        for name, module in model.named_modules()
    }


def _twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    one, other = build().train(), build().train()
    other.load_state_dict(one.state_dict())
    return one, other


def _first_difference(
    one: nn.Module, other: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int
) -> str | None:
    """Train both and name the first value that differs in a bit."""
    with _own_random_state(one):
        pairs = zip(_train(one, loss, steps), _train(other, loss, steps), strict=True)
        found = (_difference(step, *pair) for step, pair in enumerate(pairs))
        return next(filter(None, found), None)


def _own_random_state(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the random state of the host and of the model's devices afterwards."""
    used = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next((device.type for device in used), "cuda")
    return torch.random.fork_rng(devices=[device.index for device in used], device_type=kind)


def _train(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield, step by step, the loss, every gradient and every weight after the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        value = loss(model)
        torch.autograd.backward(value)
        optimizer.step()
        yield {
            "loss": value.detach(),
            **{
                f"gradient of {name}": parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            },
            **{f"weight {name}": weight for name, weight in model.state_dict().items()},
        }


def _difference(
    step: int, plain: dict[str, torch.Tensor], swapped: dict[str, torch.Tensor]
) -> str | None:
    for name in plain | swapped:
        if name not in plain or name not in swapped or not _same_bits(plain[name], swapped[name]):
            return f"{name} in step {step}"
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: 0.0 is not -0.0, and a NaN equals its copy."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(x.detach().reshape(-1).view(torch.uint8) for x in (one, other)))
