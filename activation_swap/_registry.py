# SPDX-License-Identifier: Apache-2.0
"""Which adapter serves a model, in which order everything is checked, and the one way to apply."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, get_args

from activation_swap._check import Check, compare
from activation_swap._config import SwapPolicy, TrainingSetup
from activation_swap._explanation import Explanation
from activation_swap._request import Mode, check_policy, check_setup
from activation_swap._swap import Swap
from activation_swap.adapters import BUILT_IN, Adapter
from activation_swap.compat.classes import original_class, peel, qualified_name
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from activation_swap._site import Site
    from activation_swap.core.install import InstalledSwap
    from activation_swap.errors import ActivationSwapError

__all__ = ["ENTRY_POINT_GROUP", "Registry", "registry"]

ENTRY_POINT_GROUP: Final = "activation_swap.adapters"

_UNSUPPORTED_WRAPPERS: Final = {
    "torch.nn.parallel.data_parallel.DataParallel": (
        "use DistributedDataParallel: apply to the model, then wrap it"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "use torch.distributed.fsdp.fully_shard, before or after apply"
    ),
}

_STILL_SWAPPED: Final = (
    "activation_swap: none: the model is swapped by an earlier apply, which this does not undo: "
    "call remove() on its Swap, which registry.apply('attention', model) returns."
)

_logger = logging.getLogger(__name__)


class Registry:
    """The adapters, by qualified name of the model class.

    Args:
        adapters: Registered from the start.
        entry_point_group: Where out-of-tree adapters announce themselves. They are loaded when a
            model comes that no registered adapter serves.
    """

    def __init__(
        self, adapters: Iterable[Adapter] = (), *, entry_point_group: str = ENTRY_POINT_GROUP
    ) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._entry_point_group = entry_point_group
        self._entry_points_loaded = False
        self._broken_entry_points: list[Check] = []
        for adapter in adapters:
            self.register(adapter)

    @property
    def model_classes(self) -> tuple[str, ...]:
        """Qualified names of the model classes that registered adapters serve."""
        return tuple(sorted(self._adapters))

    def register(self, adapter: Adapter) -> None:
        """Add an adapter.

        Args:
            adapter: Serves model classes that no other adapter serves. Registering an equal
                one again changes nothing.

        Raises:
            RejectedError: It is not an adapter, or one of its classes has another one already.
        """
        problem = _adapter_problem(adapter)
        if problem is not None:
            raise Reason.INVALID_ADAPTER.error(found=problem, where=repr(adapter))
        for name in adapter.model_classes:
            if self._adapters.get(name, adapter) != adapter:
                raise Reason.DUPLICATE_ADAPTER.error(
                    found=f"{self._adapters[name]!r} and {adapter!r}", where=name
                )
        self._adapters.update(dict.fromkeys(adapter.model_classes, adapter))

    def apply(
        self,
        mode: str,
        model: nn.Module | Sequence[nn.Module],
        *,
        setup: TrainingSetup | None = None,
        policy: SwapPolicy | None = None,
    ) -> Swap:
        """Swap the attention activations of a model, from the next training forward on.

        All or nothing: what is refused leaves the model untouched. Applying again with the same
        set-up and policy, or without them, returns the same live :class:`Swap`.

        Args:
            mode: ``"none"`` does nothing at all. It does not undo an earlier ``"attention"``, and
                warns where one is live.
            model: The model on its device; with ``setup.pp_size`` above 1 this rank's stage module
                or a sequence of them.
            setup: What the trainer knows and the model cannot tell. (Default: that of the live
                swap, else ``TrainingSetup()``, one device)
            policy: What moves. (Default: that of the live swap, else ``SwapPolicy()``)

        Returns:
            The handle. Inactive for ``"none"``, and for pipeline stages without attention.

        Raises:
            RejectedError: A ``ValueError``: the model, the set-up or a value is not supported.
            UnsupportedBackendError: A ``NotImplementedError``: not PyTorch.
        """
        if mode not in get_args(Mode):
            raise Reason.UNKNOWN_MODE.error(found=repr(mode), where="activation_swap")
        live = _live_on(model)
        if mode == "none":
            if live is not None:
                warnings.warn(_STILL_SWAPPED, UserWarning, stacklevel=2)
            return Swap()
        setup = _setup_of(live) if setup is None else setup
        explanation = self._examine(model, setup, policy)
        explanation.raise_first()
        if not explanation.sites:
            _logger.info("activation_swap: attention: no attention in the stages of this rank")
            return Swap()
        for notice in explanation.notices:
            warnings.warn(notice, UserWarning, stacklevel=2)
        return _install(explanation.sites, setup, SwapPolicy() if policy is None else policy)

    def explain(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        setup: TrainingSetup | None = None,
        policy: SwapPolicy | None = None,
    ) -> Explanation:
        """Make every check of ``apply("attention", model, ...)`` and report each.

        Args:
            model: As for :meth:`apply`. It is not changed.
            setup: As for :meth:`apply`.
            policy: As for :meth:`apply`.

        Returns:
            The checks with their results.
        """
        return self._examine(model, _setup_of(_live_on(model)) if setup is None else setup, policy)

    def _examine(self, model: object, setup: object, policy: SwapPolicy | None) -> Explanation:
        checks = list(check_setup(setup))
        if policy is not None:
            checks.append(check_policy(policy))
        if not isinstance(setup, TrainingSetup) or not _passed(checks):
            return Explanation(checks=tuple(checks))
        stages = _stages(model)
        checks += _check_stages(stages, setup)
        if not _passed(checks):
            return Explanation(checks=tuple(checks))
        checks += [self._check_class(stage, fqn) for fqn, stage in stages.items()]
        if not _passed(checks):
            # One of them may be the adapter that is missed.
            return Explanation(checks=(*checks, *self._broken_entry_points))
        return self._inspect(stages, setup, policy, tuple(checks))

    def _check_class(self, stage: Any, where: str) -> Check:
        subject, model = "class of the model", peel(stage)[-1]
        cls = original_class(type(model))
        name = qualified_name(cls)
        expected = ", ".join(self.model_classes)
        if self._serves(cls):
            return Check(subject=subject, expected=expected, found=name)
        fix = _UNSUPPORTED_WRAPPERS.get(name)
        inside = next((fqn for fqn, m in model.named_modules() if self._serves(type(m))), None)
        rejection: ActivationSwapError
        if any(self._serves(parent) for parent in cls.__mro__[1:]):
            rejection = Reason.SUBCLASSED_MODEL.error(found=name, where=where, expected=expected)
        elif fix is not None:
            rejection = Reason.UNSUPPORTED_WRAPPER.error(found=name, where=where, fix=fix)
        elif inside is not None:
            fix = f"pass {_way_in(model, inside)}"
            rejection = Reason.WRAPPED_MODEL.error(
                found=name, where=where, expected=expected, fix=fix
            )
        else:
            kin = [c for c in self.model_classes if c.rpartition(".")[0] == cls.__module__]
            fix = f"pass the whole {kin[0].rpartition('.')[2]}" if kin else None
            rejection = Reason.NO_ADAPTER.error(found=name, where=where, expected=expected, fix=fix)
        return Check(subject=subject, expected=expected, found=name, rejection=rejection)

    def _serves(self, cls: type) -> bool:
        return self._adapter_of(cls) is not None

    def _adapter_of(self, cls: type) -> Adapter | None:
        name = qualified_name(original_class(cls))
        if name not in self._adapters and not self._entry_points_loaded:
            self._load_entry_points()
        return self._adapters.get(name)

    def _load_entry_points(self) -> None:
        self._entry_points_loaded = True
        for entry_point in entry_points(group=self._entry_point_group):
            try:
                self.register(entry_point.load())
            except Exception as error:  # noqa: BLE001 - code of others, which may raise anything
                self._broken_entry_points.append(
                    compare(
                        Reason.BROKEN_ENTRY_POINT,
                        "entry point of an adapter",
                        expected="an adapter",
                        found={str(entry_point): f"{type(error).__name__}: {error}"},
                    )
                )

    def _inspect(
        self,
        stages: Mapping[str, Any],
        setup: TrainingSetup,
        policy: SwapPolicy | None,
        checks: tuple[Check, ...],
    ) -> Explanation:
        # Mode none imports neither torch nor core, so they are imported where they are needed.
        from activation_swap.compat.site_checks import check_sites  # noqa: PLC0415

        sites: list[Site] = []
        own: list[Check] = []
        notices: dict[str, None] = {}
        names: dict[nn.Module, str] = {}
        for position, (where, stage) in enumerate(stages.items()):
            inspection = self._adapters[_class_name(stage)].inspect(stage, setup=setup)
            prefix = f"{where}." if len(stages) > 1 else ""
            sites += [
                replace(site, fqn=prefix + site.fqn, stage=position) for site in inspection.sites
            ]
            own += [check.within(prefix) for check in inspection.checks]
            notices |= dict.fromkeys(inspection.notices)
            names |= {module: prefix + (name or "(root)") for name, module in stage.named_modules()}
        checks = (*checks, *check_sites(sites, names), *own)
        if _passed(checks):
            checks = (*checks, _check_any(sites, setup), _check_ownership(sites, setup, policy))
        return Explanation(checks=checks, sites=tuple(sites), notices=tuple(notices))


def _way_in(wrapper: Any, fqn: str) -> str:
    if callable(getattr(wrapper, "get_base_model", None)):  # PEFT has a name of its own for it
        return "model.get_base_model()"
    if all(part.isidentifier() for part in fqn.split(".")):
        return f"model.{fqn}"
    return f"model.get_submodule({fqn!r})"


def _class_name(stage: Any) -> str:
    return qualified_name(original_class(type(peel(stage)[-1])))


def _passed(checks: Iterable[Check]) -> bool:
    return all(check.passed for check in checks)


def _adapter_problem(adapter: object) -> str | None:
    if not isinstance(adapter, Adapter):
        return f"a {type(adapter).__name__} without mode, model_classes or inspect"
    if adapter.mode != "attention":
        return f"mode {adapter.mode!r}"
    if not callable(adapter.inspect):
        return f"an inspect of type {type(adapter.inspect).__name__}"
    names: object = adapter.model_classes
    if isinstance(names, tuple) and names and all(map(_is_qualified, names)):
        return None
    return f"model_classes {names!r}"


def _is_qualified(name: object) -> bool:
    return isinstance(name, str) and "." in name


def _stages(model: object) -> dict[str, Any]:
    """Return the modules to swap by the name that messages use for them."""
    if isinstance(model, Sequence) and not isinstance(model, str | bytes):
        return {f"stages[{index}]": stage for index, stage in enumerate(model)}
    return {"model": model}


def _check_stages(stages: Mapping[str, Any], setup: TrainingSetup) -> tuple[Check, ...]:
    # A module cannot exist in a process that has not imported torch, and none is imported here.
    torch = sys.modules.get("torch")
    return (
        compare(
            Reason.NOT_A_TORCH_MODULE,
            "kind of the model",
            expected="a torch.nn.Module",
            found={
                where: (
                    "a torch.nn.Module"
                    if torch is not None and isinstance(stage, torch.nn.Module)
                    else qualified_name(type(stage))
                )
                for where, stage in stages.items()
            },
        ),
        compare(
            Reason.NO_STAGE,
            "stage modules",
            expected="at least one",
            found={"model": "at least one" if stages else "an empty sequence"},
        ),
        compare(
            Reason.STAGES_WITHOUT_PIPELINE,
            "stage modules for this pp_size",
            expected="as many as pp_size allows",
            found={
                "model": (
                    f"{len(stages)} stage modules with pp_size=1"
                    if len(stages) > 1 and setup.pp_size == 1
                    else "as many as pp_size allows"
                )
            },
        ),
    )


def _check_any(sites: Sequence[Site], setup: TrainingSetup) -> Check:
    # A rank may hold only an embedding or a head.
    some = "some" if sites or setup.pp_size > 1 else "none"
    return compare(Reason.NO_ATTENTION, "attention", expected="some", found={"model": some})


def _check_ownership(
    sites: Sequence[Site], setup: TrainingSetup, policy: SwapPolicy | None
) -> Check:
    live = _live(sites)
    found = "free"
    if live is not None:
        if {site.module() for site in live.sites} != {site.module for site in sites}:
            found = f"a Swap of {len(live.sites)} attention modules, not the same {len(sites)}"
        elif live.setup != setup:
            found = f"a Swap with {live.setup}"
        elif policy not in {None, live.policy}:
            found = f"a Swap with {live.policy}"
    return compare(
        Reason.ALREADY_SWAPPED,
        "ownership",
        expected="free",
        found={sites[0].fqn: found} if sites else {},
    )


def _live_on(model: object) -> InstalledSwap | None:
    """Return what is live on any module of a model of which nothing is known yet."""
    if "activation_swap.core.install" not in sys.modules:
        # Nothing was ever installed, and mode none imports no torch.
        return None
    from torch import nn  # noqa: PLC0415

    from activation_swap.core.install import find_installation  # noqa: PLC0415

    stages = [stage for stage in _stages(model).values() if isinstance(stage, nn.Module)]
    return find_installation(module for stage in stages for module in stage.modules())


def _setup_of(live: InstalledSwap | None) -> TrainingSetup:
    return TrainingSetup() if live is None else live.setup


def _live(sites: Sequence[Site]) -> InstalledSwap | None:
    from activation_swap.core.install import find_installation  # noqa: PLC0415

    return find_installation(site.module for site in sites)


def _install(sites: tuple[Site, ...], setup: TrainingSetup, policy: SwapPolicy) -> Swap:
    from activation_swap.core.install import install  # noqa: PLC0415
    from activation_swap.core.swap_plan import SwapPlan  # noqa: PLC0415

    live = _live(sites)
    if live is None:
        live = install(SwapPlan(sites=sites, setup=setup, policy=policy))
    swap = live.swap
    if swap is None:
        swap = live.swap = Swap(live)
    return swap


registry: Final = Registry(BUILT_IN)
"""The registry that users import, with the adapters of this release."""
