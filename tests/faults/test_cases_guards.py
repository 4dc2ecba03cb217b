# SPDX-License-Identifier: Apache-2.0
"""Field cases where the right answer is a refusal by name: C32, C35, C36, C37, C39, C43."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as wrap_in_checkpoint,
)

from activation_swap import ActivationSwapError, Registry, TrainingSetup, registry
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention
from activation_swap.errors import RejectedError
from tests.faults.harness import apply, at_base, one_rank
from tests.models import (
    EVERYTHING,
    TINY,
    Step,
    build,
    difference,
    forward,
    gradients,
    step,
    tokens,
    twins,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.level0, pytest.mark.usefixtures("exact")]


def untouched(model: Any) -> bool:
    """Whether no attention of a model has a hook."""
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def staged(model: Any, kind: str) -> Any:
    """Keep layers 2 to 5 of a model of six, as pipeline code does it in the field."""
    layers = list(model.model.layers)
    if kind == "list":
        model.model.layers = nn.ModuleList(layers[2:])
    elif kind == "dict":
        model.model.layers = nn.ModuleDict({str(n): layers[n] for n in range(2, 6)})
    elif kind == "identity":
        model.model.layers = nn.ModuleList(
            [layers[2], layers[3], nn.Identity(), layers[4], layers[5]]
        )
    elif kind == "none":
        for index in (0, 1):
            model.model.layers._modules[str(index)] = None
    return model


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("list", ["0", "1", "2", "3"]),
        ("dict", ["2", "3", "4", "5"]),
        ("identity", ["0", "1", "3", "4"]),
        ("none", ["2", "3", "4", "5"]),
    ],
)
def test_c32_stages_of_odd_shapes(kind: str, names: list[str]) -> None:
    """Every attention of the stage once, under its own name, in the order of the stage."""
    plain, model = (staged(build(num_hidden_layers=6), kind) for _ in range(2))
    setup = TrainingSetup(pp_size=2)
    assert [site.fqn for site in registry.explain(model, setup=setup).sites] == [
        f"model.layers.{name}.self_attn" for name in names
    ]

    def run(model: Any, verbs: Any = None) -> Step:
        model.zero_grad(set_to_none=True)
        layers = model.model.layers
        layers = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(2, 6, 64, generator=generator)
        embeddings = model.model.rotary_emb(hidden, torch.arange(6)[None])
        if verbs is not None:
            verbs.set_group((1, 0))
        for layer in layers:
            if layer is None or isinstance(layer, nn.Identity):
                continue
            hidden = layer(hidden, position_embeddings=embeddings, attention_mask=None)
        if verbs is not None:
            verbs.set_group(None)
            for verb in ("launch_offload", "wait_offload", "launch_reload", "wait_reload"):
                getattr(verbs, verb)((1, 0))
        loss = hidden.square().mean()
        loss.backward()
        return Step(loss.detach(), gradients(model))

    expected = run(plain)
    swap: Any = registry.apply("attention", model, setup=setup, policy=EVERYTHING)
    assert difference(run(model, swap.groups), expected) is None
    assert swap.stats().saved_bytes > 0
    assert swap.stats().offloaded_storages % len(names) == 0
    assert at_base(swap)


def test_c32_a_stage_without_attention_is_a_logged_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    model.model.layers = nn.ModuleList()
    with caplog.at_level("INFO", logger="activation_swap"):
        swap = registry.apply("attention", model, setup=TrainingSetup(pp_size=2))
    assert not swap.active
    assert "no attention in the stages of this rank" in caplog.text


@pytest.mark.parametrize("order", ["apply-first", "shard-first"])
@pytest.mark.parametrize("unit", ["layers", "attentions"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_c35_fsdp2_renames_the_class(tmp_path: Path, order: str, unit: str) -> None:
    from torch.distributed.fsdp import fully_shard

    plain, model = twins(attention="sdpa")
    expected = step(plain, tokens(plain))
    with one_rank(tmp_path) as mesh:
        swap = apply(model) if order == "apply-first" else None
        for layer in model.model.layers:
            fully_shard(layer.self_attn if unit == "attentions" else layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert type(model).__name__ != "Qwen3MoeForCausalLM"
        if swap is None:
            swap = apply(model)
        found = step(model, tokens(model))
        full: dict[str, torch.Tensor] = {
            name: gradient.full_tensor()  # type: ignore[attr-defined]
            for name, gradient in found.gradients.items()
        }
        assert difference(Step(found.loss, full), expected) is None
        assert swap.stats().saved_bytes > 0
        assert at_base(swap)


def test_c35_ddp_around_the_model(tmp_path: Path) -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))
    with one_rank(tmp_path):
        ddp = nn.parallel.DistributedDataParallel(model)
        swap = apply(model)
        ddp(input_ids=tokens(model), labels=tokens(model), use_cache=False).loss.backward()
        assert swap.stats().saved_bytes > 0
        found = Step(expected.loss, gradients(model))
        assert difference(found, expected) is None


def subclass() -> Any:
    kind = type(build())
    return type("MyQwen", (kind,), {"__module__": "mine"})(build().config)


def other_model(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            **{k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
        )
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build().model, "Qwen3MoeModel"),
        (subclass, r"mine\.MyQwen"),
        (other_model("Qwen3"), "Qwen3ForCausalLM"),
        (other_model("Mixtral"), "MixtralForCausalLM"),
    ],
    ids=["headless", "subclass", "dense", "mixtral"],
)
def test_c35_other_classes_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    model = make()
    with pytest.raises(RejectedError, match=message):
        apply(model, EVERYTHING)
    assert untouched(model)


def compiled_whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_layer(model: Any) -> Any:
    model.model.layers[0].compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    attention = model.model.layers[0].self_attn
    attention.forward = torch.compile(attention.forward, backend="eager")
    return model


# Dynamo warns of much that is its own.
DYNAMO = pytest.mark.filterwarnings("ignore")
COMPILED = [compiled_whole, compiled_in_place, compiled_layer, compiled_forward]


@pytest.mark.parametrize("compiled", COMPILED)
def test_c36_compiled_before_apply(compiled: Callable[[Any], Any]) -> None:
    with pytest.raises(RejectedError, match=r"compile"):
        apply(compiled(build()), EVERYTHING)


@DYNAMO
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_layer])
def test_c36_compiled_after_apply(compiled: Callable[[Any], Any]) -> None:
    model = build()
    swap = apply(model)
    later = compiled(model)
    with pytest.raises(RejectedError, match=r"AS602(.|\n)*compile"):
        forward(later, tokens(model))
    torch.compiler.reset()
    assert at_base(swap)


@DYNAMO
def test_c36_none_leaves_compile_alone() -> None:
    plain, model = twins()
    registry.apply("none", model)
    model.compile(backend="eager")
    assert difference(step(model, tokens(model)), step(plain, tokens(plain))) is None
    torch.compiler.reset()


def enabled(*, reentrant: bool) -> Callable[[Any], None]:
    return lambda model: model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )


def wrap_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrap_in_checkpoint(layer)


def wrap_attentions(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = wrap_in_checkpoint(layer.self_attn)


def wrap_moe(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = wrap_in_checkpoint(layer.mlp)


OVERLAPPING = {
    "reentrant": enabled(reentrant=True),
    "non-reentrant": enabled(reentrant=False),
    "layers": wrap_layers,
    "attentions": wrap_attentions,
}


# Newer releases rename the switch.
RENAMED = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")


@RENAMED
@pytest.mark.parametrize("checkpoint", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_c37_checkpointing_before_apply(checkpoint: Callable[[Any], None]) -> None:
    model = build()
    checkpoint(model)
    with pytest.raises(RejectedError, match=r"checkpoint(.|\n)*activation_swap|checkpoint"):
        apply(model)
    assert not any(m._forward_pre_hooks for m in model.modules() if hasattr(m, "q_proj"))


@RENAMED
@pytest.mark.parametrize("name", ["reentrant", "non-reentrant"])
@pytest.mark.filterwarnings("ignore:.*reentrant:UserWarning")
def test_c37_checkpointing_after_apply(name: str) -> None:
    model = build()
    swap = apply(model)
    OVERLAPPING[name](model)
    with pytest.raises(RejectedError, match=r"AS601(.|\n)*gradient checkpointing"):
        forward(model, tokens(model))
    assert at_base(swap)
    model.gradient_checkpointing_disable()
    plain = build()
    assert difference(step(model, tokens(model)), step(plain, tokens(plain))) is None


def test_c37_checkpointing_of_the_moe_block_alone_works() -> None:
    plain, model = twins()
    expected = step(plain, tokens(plain))
    wrap_moe(model)
    swap = apply(model)
    found = step(model, tokens(model))
    renamed = {
        name.replace("_checkpoint_wrapped_module.", ""): g for name, g in found.gradients.items()
    }
    assert difference(Step(found.loss, renamed), expected) is None
    assert swap.stats().saved_bytes > 0


@pytest.mark.parametrize("mode", ["Attention", "true", "mlp", "", None, True])
def test_c39_illegal_values(mode: Any) -> None:
    model = build()
    with pytest.raises(ActivationSwapError) as caught:
        registry.apply(mode, model)
    assert repr(mode) in str(caught.value)
    assert "none | attention" in str(caught.value)
    assert untouched(model)


def test_c39_other_back_ends_and_meta() -> None:
    cell = type("Cell", (), {"__module__": "mindspore.nn.cell"})()
    with pytest.raises(NotImplementedError, match=r"mindspore\.nn\.cell\.Cell"):
        registry.apply("attention", cell)
    with pytest.raises(NotImplementedError, match="mindspore"):
        registry.apply("attention", build(), setup=TrainingSetup(backend="mindspore"))
    with pytest.raises(RejectedError, match="meta"):
        registry.apply("attention", build().to("meta"))


def test_c39_none_leaves_the_model_object_for_object() -> None:
    model = build()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    swap = registry.apply("none", model)
    assert not swap.active
    assert untouched(model)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert "forward" not in vars(module)


def test_c39_a_model_on_the_cpu_is_swapped_to_host_buffers() -> None:
    plain, model = twins()
    swap = apply(model)
    assert difference(step(model, tokens(model)), step(plain, tokens(plain))) is None
    assert swap.stats().saved_bytes > 0


def other_signature(kind: str) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention as Attention

    original = Attention.forward

    def more(self: Any, *args: Any, window: int = 0, **kwargs: Any) -> Any:
        return original(self, *args, window=window, **kwargs)

    def fewer(self: Any, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        return original(self, hidden_states, position_embeddings, **kwargs)

    return {"more": more, "fewer": fewer}[kind]


@pytest.mark.parametrize("kind", ["more", "fewer"])
def test_c43_a_renamed_signature_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention as Attention

    model = build()
    monkeypatch.setattr(Attention, "forward", other_signature(kind))
    with pytest.raises(RejectedError, match="forward"):
        apply(model)
    assert untouched(model)


def test_c43_another_return_arity_is_refused_at_the_first_forward() -> None:
    model = build()
    attention = model.model.layers[1].self_attn
    attention.register_forward_hook(lambda _, __, result: (*result, None))
    swap = apply(model)
    with pytest.raises(RejectedError, match=r"layers\.1\.self_attn(.|\n)*a tuple of 3"):
        forward(model, tokens(model))
    assert at_base(swap)


def test_c43_an_unsupported_release_is_named() -> None:
    old = Registry([Qwen3MoeAttention(transformers_version="4.50.3")])
    with pytest.raises(RejectedError, match=r"4\.50\.3(.|\n)*4\.51"):
        old.apply("attention", build())
