# SPDX-License-Identifier: Apache-2.0
"""The public surface, frozen: a change here is a change of the API."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import activation_swap
from activation_swap import (
    KeepReason,
    Registry,
    Swap,
    SwapPolicy,
    SwapStats,
    TrainingSetup,
    adapters,
    errors,
    pipelining,
    testing,
)

pytestmark = pytest.mark.unit


def test_names_of_the_package() -> None:
    assert activation_swap.__all__ == [
        "ActivationSwapError",
        "Explanation",
        "KeepReason",
        "Mode",
        "Overlap",
        "Registry",
        "Swap",
        "SwapPolicy",
        "SwapStats",
        "TrainingSetup",
        "errors",
        "registry",
    ]
    assert all(hasattr(activation_swap, name) for name in activation_swap.__all__)
    assert isinstance(activation_swap.registry, Registry)


def test_names_of_modules() -> None:
    assert errors.__all__ == [
        "ActivationSwapError",
        "InPlaceChangeError",
        "Reason",
        "RejectedError",
        "SwapStateError",
        "UnsupportedBackendError",
    ]
    assert adapters.__all__ == ["BUILT_IN", "Adapter", "Check", "Inspection", "Site", "compare"]
    assert pipelining.__all__ == [
        "Action",
        "ComputeOrder",
        "GroupKey",
        "GroupVerbs",
        "Keep",
        "Kind",
        "LoweredStep",
        "ScheduleRunner",
        "Step",
        "format_grid",
        "format_plan",
        "gpipe_order",
        "one_f_one_b_order",
        "parse_plan",
        "plan_rank",
        "validate",
    ]
    assert testing.__all__ == ["Comparison", "check_adapter", "compare_runs"]


@pytest.mark.parametrize(
    ("call", "signature"),
    [
        (
            Registry.apply,
            (
                "(self, mode: 'str', model: 'nn.Module | Sequence[nn.Module]', *, "
                "setup: 'TrainingSetup | None' = None, policy: 'SwapPolicy | None' = None) "
                "-> 'Swap'"
            ),
        ),
        (
            Registry.explain,
            (
                "(self, model: 'nn.Module | Sequence[nn.Module]', *, "
                "setup: 'TrainingSetup | None' = None, policy: 'SwapPolicy | None' = None) "
                "-> 'Explanation'"
            ),
        ),
        (Registry.register, "(self, adapter: 'Adapter') -> 'None'"),
        (pipelining.ScheduleRunner, "(verbs: 'GroupVerbs') -> 'None'"),
        (
            pipelining.ScheduleRunner.begin_step,
            "(self, plan: 'Iterable[LoweredStep] | None') -> 'None'",
        ),
        (pipelining.ScheduleRunner.begin_passive, "(self) -> 'None'"),
        (pipelining.ScheduleRunner.compute, "(self, action: 'Action') -> 'Iterator[None]'"),
        (
            pipelining.plan_rank,
            (
                "(order: 'Sequence[Step]', *, attentions: 'Mapping[int, int]', "
                "deferred_weight_stages: 'Collection[int]' = ()) -> 'tuple[LoweredStep, ...]'"
            ),
        ),
        (
            TrainingSetup,
            (
                "(*, backend: 'str' = 'pytorch', pp_size: 'int' = 1, compile: 'bool' = False, "
                "activation_checkpoint: 'str' = 'off') -> None"
            ),
        ),
    ],
)
def test_signatures(call: object, signature: str) -> None:
    assert callable(call)
    assert str(inspect.signature(call)) == signature


def test_fields_of_the_policy_and_their_defaults() -> None:
    assert dataclasses.asdict(SwapPolicy()) == {
        "min_bytes": 1 << 20,
        "min_coverage": 0.5,
        "keep_last": True,
        "fraction": 1.0,
        "narrow": True,
        "slab_bytes": 64 << 20,
        "max_host_bytes": None,
    }


@pytest.mark.parametrize("cls", [TrainingSetup, SwapPolicy, SwapStats])
def test_values_are_frozen_and_keyword_only(cls: type) -> None:
    value = cls()

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(cls)[0].name, 1)
    with pytest.raises(TypeError):
        cls(1)


def test_fields_of_the_stats() -> None:
    promised = {
        "offloaded_bytes",
        "reloaded_bytes",
        "offloaded_storages",
        "saved_bytes",
        "reload_misses",
        "late_releases",
        "live_groups",
        "host_bytes_in_use",
        "host_bytes_reserved",
        "kept_bytes",
    }

    assert promised <= {field.name for field in dataclasses.fields(SwapStats)}
    assert all(isinstance(reason.value, str) for reason in KeepReason)


def test_what_a_swap_offers() -> None:
    offered = {name for name in vars(Swap) if not name.startswith("_")}

    assert offered == {
        "active",
        "attach",
        "groups",
        "measure_overlap",
        "remove",
        "reset_stats",
        "stats",
    }


def test_what_adapters_and_schedulers_implement_or_use() -> None:
    assert [field.name for field in dataclasses.fields(adapters.Site)] == [
        "fqn",
        "module",
        "owners",
        "checkpoint_flag_owner",
        "cache_arguments",
        "stage",
        "returns",
    ]
    assert [field.name for field in dataclasses.fields(adapters.Inspection)] == [
        "sites",
        "checks",
        "notices",
    ]
    verbs = [name for name in vars(pipelining.GroupVerbs) if not name.startswith("_")]
    assert verbs == [
        "set_group",
        "launch_offload",
        "wait_offload",
        "launch_reload",
        "wait_reload",
        "abort",
    ]
