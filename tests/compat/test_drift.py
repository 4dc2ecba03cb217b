# SPDX-License-Identifier: Apache-2.0
"""What a release that moved something looks like to the probe and to the canary."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version
from torch import nn

from activation_swap import Registry, SwapPolicy, registry
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention
from activation_swap.compat import canary
from activation_swap.compat.canary import main, report, tiny_model
from activation_swap.errors import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit

NEXT = Version("5.25.0")
MODELING = "transformers.models.qwen3_moe.modeling_qwen3_moe"
CACHE = "hidden_states, position_embeddings, attention_mask, cache=None"


def attention_of(model: Any) -> Any:
    return type(model.model.layers[0].self_attn)


def give_forward(model: Any, patch: pytest.MonkeyPatch, parameters: str) -> None:
    """Define a forward as the next Transformers might, in its own module."""
    space = {"__name__": MODELING}
    exec(f"def forward(self, {parameters}, **kwargs): ...", space)  # noqa: S102 - a test's text
    patch.setattr(attention_of(model), "forward", space["forward"])


def rename_attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    cls = attention_of(model)
    renamed = type("Qwen3MoeSelfAttention", (cls.__base__,), dict(vars(cls)))
    patch.setattr(f"{MODELING}.Qwen3MoeSelfAttention", renamed, raising=False)
    for layer in model.model.layers:
        layer.self_attn.__class__ = renamed


def move_attention(model: Any, _: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.attention = layer.self_attn
        del layer.self_attn


def move_layers(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.blocks = model.model.layers
    del model.model.layers


def drop_attention(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn = None


def checkpoint_elsewhere(_: Any, patch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    patch.delattr(GradientCheckpointingLayer, "__init_subclass__")


DRIFTS: list[tuple[str, Callable[[Any, pytest.MonkeyPatch], None], list[str]]] = [
    (
        "class-renamed",
        rename_attention,
        [
            "AS204 class of the attention, at model.layers.0.self_attn (+1 more)",
            f"  found    {MODELING}.Qwen3MoeSelfAttention",
            (
                '  add      ATTENTION_CLASS: Row(versions=SpecifierSet(">=5.25.dev0"), '
                f"value='{MODELING}.Qwen3MoeSelfAttention')"
            ),
        ],
    ),
    (
        "parameter-renamed",
        lambda model, patch: give_forward(model, patch, CACHE.replace("cache", "kv_cache")),
        [
            (
                "  found    (self, hidden_states, position_embeddings, attention_mask, "
                "kv_cache=None, **kwargs)"
            ),
            (
                '  add      ATTENTION_SIGNATURE: Row(versions=SpecifierSet(">=5.25.dev0"), '
                "value='(self, hidden_states, position_embeddings, attention_mask, kv_cache=None, "
                "**kwargs)')"
            ),
        ],
    ),
    (
        "parameter-added",
        lambda model, patch: give_forward(model, patch, f"{CACHE}, window=None"),
        ["AS208 signature of the attention's forward, at model.layers.0.self_attn (+1 more)"],
    ),
    (
        "parameter-removed",
        lambda model, patch: give_forward(model, patch, "hidden_states, position_embeddings"),
        ["  found    (self, hidden_states, position_embeddings, **kwargs)"],
    ),
    (
        "parameter-keyword-only",
        lambda model, patch: give_forward(model, patch, CACHE.replace("cache", "*, cache")),
        [
            (
                "  found    (self, hidden_states, position_embeddings, attention_mask, "
                "*, cache=None, **kwargs)"
            )
        ],
    ),
    (
        "attention-moved",
        move_attention,
        [
            "AS203 parts of the model, at model.layers.0.self_attn (+1 more)",
            "AS210 attention elsewhere, at model.layers.0.attention (+1 more)",
            "  expected nothing",
        ],
    ),
    (
        "layers-moved",
        move_layers,
        [
            "AS203 parts of the model, at model.layers",
            "AS210 attention elsewhere, at model.blocks.0.self_attn (+1 more)",
        ],
    ),
    (
        "layers-fewer-than-the-configuration-says",
        lambda model, _: model.model.layers.__delitem__(1),
        ["AS206 number of layers, at model.layers"],
    ),
    (
        "layer-without-attention",
        drop_attention,
        ["AS203 parts of the model, at model.layers.1.self_attn"],
    ),
    (
        "checkpointing-elsewhere",
        checkpoint_elsewhere,
        [
            "AS211 call that gradient checkpointing wraps, at model.layers.0 (+1 more)",
            (
                '  add      CHECKPOINT_SITE: Row(versions=SpecifierSet(">=5.25.dev0"), '
                "value='unknown, in transformers.modeling_layers.GradientCheckpointingLayer')"
            ),
        ],
    ),
]
IDS = [name for name, _, _ in DRIFTS]


@pytest.mark.parametrize(("drift", "lines"), [d[1:] for d in DRIFTS], ids=IDS)
def test_canary_prints_what_to_add(
    drift: Callable[[Any, pytest.MonkeyPatch], None],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    drift(model, monkeypatch)

    supported, text = report(model, version=NEXT)

    assert not supported
    assert text.startswith("transformers 5.25.0: not supported yet\n")
    for line in lines:
        assert line in text.splitlines()


@pytest.mark.parametrize("drift", [d[1] for d in DRIFTS], ids=IDS)
def test_apply_refuses_and_installs_nothing(
    drift: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    drift(model, monkeypatch)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    newer = Registry([Qwen3MoeAttention(transformers_version=str(NEXT))])

    with pytest.raises(RejectedError):
        newer.apply("attention", model)

    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_canary_sees_another_return_arity(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(
        type(model.model.layers[0]), "forward", lambda self, x, **kw: self.self_attn(x, **kw)[0]
    )
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: (*output, None))

    supported, text = report(model, version=NEXT)

    assert not supported
    assert "AS214 length of the tuple that the attention returns, at model.layers.0" in text
    assert "  found    a tuple of 3\n  expected 2\n" in text


def test_all_differences_are_reported_at_once() -> None:
    supported, text = report(tiny_model(), version=Version("4.52.4"))

    assert not supported
    assert [line.split()[0] for line in text.splitlines() if line.startswith("AS")] == [
        "AS208",
        "AS211",
        "AS212",
    ]


def test_a_newer_release_without_drift_is_applied_with_one_warning() -> None:
    newer = Registry([Qwen3MoeAttention(transformers_version="5.26.0rc1")])

    with pytest.warns(UserWarning, match=r"transformers 5\.26\.0rc1 is newer") as warned:
        swap = newer.apply("attention", tiny_model())

    assert swap.active
    assert len(warned) == 1


def test_the_warning_of_a_newer_release_names_the_line_that_applies() -> None:
    newer = Registry([Qwen3MoeAttention(transformers_version="5.26.0rc1")])

    with pytest.warns(UserWarning, match="is newer") as warned:
        newer.apply("attention", tiny_model())

    assert warned[0].filename == __file__


def test_another_return_arity_stops_the_first_forward() -> None:
    import torch

    model = tiny_model().train()
    model.model.layers[1].self_attn.register_forward_hook(lambda _, __, output: (*output, None))
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=0, keep_last=False))

    with pytest.raises(RejectedError) as refusal:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)

    assert refusal.value.reason is Reason.RETURN_ARITY
    assert refusal.value.where == "model.layers.1.self_attn"


def test_canary_says_supported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main() == 0
    assert capsys.readouterr().out.startswith("transformers 5.")

    supported, text = report(tiny_model(), version=NEXT)
    assert supported
    assert text.splitlines()[0] == "transformers 5.25.0: supported"
    assert "raise TESTED, now >=4.51.dev0, <5.25.dev0" in text
    assert report(tiny_model(), version=Version("5.24.0")) == (
        True,
        "transformers 5.24.0: supported",
    )

    monkeypatch.setattr(canary, "installed_release", lambda: "4.50.0")
    assert main() == 1
    assert "AS201" in capsys.readouterr().out

    monkeypatch.setattr(canary, "installed_release", lambda: "4.51.0")
    assert main() == 1
    assert "not supported yet" in capsys.readouterr().out


def test_the_module_exits_with_what_it_found() -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("activation_swap.compat", run_name="__main__")

    assert ended.value.code == 0


def test_a_layer_of_another_base_has_an_unknown_checkpoint_site() -> None:
    model = tiny_model()
    model.model.layers[0].__class__ = type("Layer", (nn.Identity, type(model.model.layers[0])), {})

    _, text = report(model, version=NEXT)

    assert "  found    unknown, in torch.nn.modules.linear.Identity" in text
