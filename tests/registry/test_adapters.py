# SPDX-License-Identifier: Apache-2.0
"""Registering adapters by hand and by entry point; a model class of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from activation_swap import Registry, TrainingSetup, registry
from activation_swap._site import Site
from activation_swap.adapters import BUILT_IN, Adapter, Inspection, compare
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention
from activation_swap.errors import ActivationSwapError, Reason, RejectedError

pytestmark = pytest.mark.unit


class Attention(nn.Module):
    """Something to swap."""


class Model(nn.Module):
    """A model that no built-in adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()


class ModelAdapter:
    """Serves :class:`Model`."""

    mode = "attention"
    model_classes = (f"{Model.__module__}.Model",)

    def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
        """Return the one site."""
        attention = model.get_submodule("attention")
        site = Site(fqn="attention", module=attention, owners=(model,))
        kind = type(attention).__name__
        check = compare(
            Reason.FOREIGN_CLASS, "class", expected="Attention", found={"attention": kind}
        )
        return Inspection(sites=(site,), checks=(check,), notices=(f"pp_size {setup.pp_size}",))


ADAPTER = ModelAdapter()


@pytest.fixture
def fresh() -> Registry:
    return Registry(BUILT_IN)


def declare(tmp_path: Path, value: str, *, name: str = "sample") -> None:
    """Write what installing a package with this entry point leaves in site-packages."""
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[activation_swap.adapters]\n{name} = {value}\n")


def test_this_release_serves_one_class() -> None:
    assert registry.model_classes == (
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
    )
    assert all(isinstance(adapter, Adapter) for adapter in BUILT_IN)


def test_a_registered_adapter_serves_its_class(fresh: Registry) -> None:
    fresh.register(ADAPTER)
    model = Model()

    explanation = fresh.explain(model)
    assert explanation.supported
    assert explanation.notices == ("pp_size 1",)
    (served,) = (c for c in explanation.checks if c.subject == "class of the model")
    assert served.expected == ", ".join(sorted([*registry.model_classes, *ADAPTER.model_classes]))
    with pytest.warns(UserWarning, match="pp_size 1"):
        assert fresh.apply("attention", model).active


def test_a_refusal_names_every_class_that_is_served(fresh: Registry) -> None:
    fresh.register(ADAPTER)

    check = fresh.explain(nn.Linear(1, 1)).checks[-1]

    assert check.subject == "class of the model"
    assert check.expected == ", ".join(fresh.model_classes)
    assert check.found == "torch.nn.modules.linear.Linear"
    assert check.rejection is not None
    assert check.rejection.expected == check.expected


def test_every_stage_has_its_notices(fresh: Registry) -> None:
    class Other(ModelAdapter):
        model_classes = ("torch.nn.modules.container.Sequential",)

        def inspect(self, model: nn.Module, *, setup: TrainingSetup) -> Inspection:
            return Inspection(sites=(), notices=(f"{type(model).__name__}", f"{setup.pp_size}"))

    fresh.register(ADAPTER)
    fresh.register(Other())
    stages = [nn.Sequential(), Model(), Model()]

    notices = fresh.explain(stages, setup=TrainingSetup(pp_size=2)).notices

    assert notices == ("Sequential", "2", "pp_size 2")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_its_refusals_are_raised_and_the_guards_run(fresh: Registry) -> None:
    fresh.register(ADAPTER)
    model = Model()
    model.attention = nn.Identity()  # type: ignore[assignment]
    model.compile()

    with pytest.raises(RejectedError) as refusal:
        fresh.apply("attention", model)

    assert refusal.value.reason is Reason.COMPILED_MODEL
    assert any("AS204 attention" in line for line in refusal.value.trace)


def test_registries_are_separate(fresh: Registry) -> None:
    fresh.register(ADAPTER)

    with pytest.raises(RejectedError):
        registry.apply("attention", Model())


@pytest.mark.parametrize(
    ("adapter", "found"),
    [
        (object(), "a object without mode, model_classes or inspect"),
        (type("A", (ModelAdapter,), {"mode": "mlp"})(), "mode 'mlp'"),
        (type("A", (ModelAdapter,), {"mode": None})(), "mode None"),
        (type("A", (ModelAdapter,), {"inspect": 3})(), "an inspect of type int"),
        (type("A", (ModelAdapter,), {"model_classes": ()})(), "model_classes ()"),
        (type("A", (ModelAdapter,), {"model_classes": "a.B"})(), "model_classes 'a.B'"),
        (type("A", (ModelAdapter,), {"model_classes": ("Model",)})(), "model_classes ('Model',)"),
        (type("A", (ModelAdapter,), {"model_classes": (Model,)})(), "model_classes (<class "),
    ],
)
def test_what_is_not_an_adapter_is_refused(fresh: Registry, adapter: Any, found: str) -> None:
    before = fresh.model_classes

    with pytest.raises(RejectedError) as refusal:
        fresh.register(adapter)

    assert refusal.value.reason is Reason.INVALID_ADAPTER
    assert refusal.value.found.startswith(found)
    assert refusal.value.where == repr(adapter)
    assert fresh.model_classes == before


def test_a_class_has_one_adapter_and_a_refused_one_adds_nothing(fresh: Registry) -> None:
    greedy = type("A", (ModelAdapter,), {"model_classes": ("a.B", *registry.model_classes)})()

    with pytest.raises(RejectedError) as refusal:
        fresh.register(greedy)

    assert refusal.value.reason is Reason.DUPLICATE_ADAPTER
    assert refusal.value.where == registry.model_classes[0]
    assert refusal.value.found == f"{BUILT_IN[0]!r} and {greedy!r}"
    assert fresh.model_classes == registry.model_classes


def test_registering_an_equal_adapter_again_changes_nothing(fresh: Registry) -> None:
    for _ in range(2):
        fresh.register(ADAPTER)
        fresh.register(Qwen3MoeAttention())

    assert len(fresh.model_classes) == 2


def test_an_entry_point_is_loaded_only_when_it_is_needed(
    fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    (tmp_path / "sample_adapter.py").write_text(
        "from tests.registry.test_adapters import ADAPTER as adapter\n"
    )
    declare(tmp_path, "sample_adapter:adapter")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert fresh.explain(model).supported
    assert fresh.model_classes == registry.model_classes

    module = __import__("tests.registry.test_adapters", fromlist=["Model"])
    for _ in range(2):
        assert fresh.explain(module.Model()).supported
    assert len(fresh.model_classes) == 2
    for _ in range(2):  # loading it once more would register it once more
        explanation = fresh.explain(nn.Identity())
        assert [error.reason for error in explanation.rejections] == [Reason.NO_ADAPTER]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("no_such_module_here:adapter", "ModuleNotFoundError: No module named"),
        ("json:adapter", "AttributeError: module 'json' has no attribute 'adapter'"),
        ("json:loads", "RejectedError: AS110"),
        ("raises_at_import:adapter", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_entry_point_is_named(
    fresh: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    found: str,
) -> None:
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    declare(tmp_path, value)
    monkeypatch.syspath_prepend(str(tmp_path))

    for _ in range(2):
        explanation = fresh.explain(Model())
        unserved, broken = explanation.rejections
        assert unserved.reason is Reason.NO_ADAPTER
        check = explanation.checks[-1]
        assert (check.subject, check.expected) == ("entry point of an adapter", "an adapter")
        assert broken.reason is Reason.BROKEN_ENTRY_POINT
        assert broken.found.startswith(found)
        assert value in str(broken.where)


def test_a_broken_entry_point_stops_nobody_else(
    fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sound_adapter.py").write_text(
        "from tests.registry.test_adapters import ADAPTER as adapter\n"
    )
    declare(tmp_path, "json:adapter", name="broken")
    declare(tmp_path, "sound_adapter:adapter", name="sound")
    monkeypatch.syspath_prepend(str(tmp_path))

    module = __import__("tests.registry.test_adapters", fromlist=["Model"])
    assert fresh.explain(module.Model()).supported


@pytest.fixture
def model() -> Any:
    from activation_swap.compat.canary import tiny_model

    return tiny_model()


def test_the_explanation_of_a_sound_model(model: Any) -> None:
    expected = Path(__file__).with_name("explanation.txt").read_text(encoding="utf-8")

    assert str(registry.explain(model)) + "\n" == expected


def test_the_explanation_of_a_refused_model(model: Any) -> None:
    model.model.layers[0].gradient_checkpointing = True

    lines = str(registry.explain(model)).splitlines()

    assert lines[0] == "activation_swap: attention: refused"
    at = lines.index("  AS303  gradient checkpointing: on, at model.layers.0")
    assert lines[at + 1] == "         expected off"


@pytest.mark.parametrize("version", ["4.50.0", "unknown"])
def test_the_explanation_of_a_refused_release(model: Any, version: str) -> None:
    old = Registry([Qwen3MoeAttention(transformers_version=version)])

    lines = str(old.explain(model)).splitlines()

    assert lines[-2].endswith(f"  transformers release: {version}, at transformers")
    assert lines[-1] == "         expected >=4.51.dev0"


def test_old_releases_keep_the_checkpointing_flag_on_the_model_without_head(model: Any) -> None:
    old = Qwen3MoeAttention(transformers_version="4.52.4")

    sites = old.inspect(model, setup=TrainingSetup()).sites

    assert [site.checkpoint_flag_owner for site in sites] == [model.model, model.model]


def test_the_explanation_ends_with_its_notices(fresh: Registry) -> None:
    fresh.register(ADAPTER)

    assert str(fresh.explain(Model())).endswith("\n  note   pp_size 1")


def test_an_error_keeps_its_parts() -> None:
    error = Reason.NO_ATTENTION.error(found="none", where="model", trace=("one",))
    other = Reason.QUANTIZED_MODEL.error(found="4 bits")

    both = error.also([other])

    assert isinstance(both, ActivationSwapError)
    assert both.trace == (
        "one",
        (
            "AS308 the model is quantized: found 4 bits, "
            "expected floating-point weights; quantized ones are untested"
        ),
    )
    assert error.also([]).trace == error.trace
    assert error.within("stages[0].").where == "stages[0].model"
    assert other.within("stages[0].").where == "stages[0]"
    assert str(both).count("also:") == 2
