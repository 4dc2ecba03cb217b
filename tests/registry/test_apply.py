# SPDX-License-Identifier: Apache-2.0
"""What apply accepts, and what applying again does."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from activation_swap import SwapPolicy, TrainingSetup, registry
from activation_swap.compat.canary import tiny_model
from activation_swap.errors import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.unit

PIPELINE = TrainingSetup(pp_size=2)


def hook_count(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    )


def fqns(model: Any, setup: TrainingSetup | None = None) -> list[str]:
    explanation = registry.explain(model, setup=setup)
    assert explanation.supported, str(explanation)
    return [site.fqn for site in explanation.sites]


@pytest.fixture
def model() -> Any:
    return tiny_model()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_none_touches_nothing_and_takes_anything(model: Any) -> None:
    untouched: tuple[Any, ...] = (model, object(), None, [])
    for thing in untouched:
        swap = registry.apply("none", thing)
        assert not swap.active
        assert swap.stats().offloaded_bytes == 0
        swap.remove()
    assert hook_count(model) == 0


def test_applying_again_returns_the_same_live_swap(model: Any) -> None:
    swap = registry.apply("attention", model)
    hooks = hook_count(model)

    for _ in range(100):
        assert registry.apply("attention", model) is swap
    assert registry.apply("attention", [model]) is swap
    again = registry.apply("attention", model, setup=TrainingSetup(), policy=SwapPolicy())
    assert again is swap
    assert hook_count(model) == hooks == 4


def test_a_swap_says_what_it_is(model: Any) -> None:
    swap = registry.apply("attention", model)
    assert repr(swap) == "Swap(active=True, attentions=2)"
    swap.remove()
    assert repr(swap) == "Swap(active=False)"

    swap = registry.apply("attention", model, setup=TrainingSetup(pp_size=2))
    assert repr(swap) == "Swap(active=True, attentions=2, attached=False)"


def test_applying_again_without_a_policy_means_the_installed_one(model: Any) -> None:
    swap = registry.apply("attention", model, policy=SwapPolicy(min_bytes=3))

    assert registry.apply("attention", model) is swap
    with pytest.raises(RejectedError, match="min_bytes=3"):
        registry.apply("attention", model, policy=SwapPolicy())


def test_applying_again_without_a_setup_means_the_installed_one(model: Any) -> None:
    swap = registry.apply("attention", model, setup=PIPELINE)

    assert registry.apply("attention", model) is swap
    assert registry.apply("attention", [model]) is swap
    assert registry.explain(model).supported
    with pytest.raises(RejectedError, match="pp_size=2"):
        registry.apply("attention", model, setup=TrainingSetup())


def test_none_says_that_it_does_not_undo_a_live_swap(model: Any) -> None:
    with registry.apply("attention", model) as swap:
        with pytest.warns(UserWarning, match="call remove\\(\\)"):
            assert not registry.apply("none", model).active
        assert swap.active
    assert not swap.active
    assert hook_count(model) == 0


def test_none_looks_for_a_live_swap_only_where_one_was_ever_installed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "activation_swap.core.install")
    assert not registry.apply("none", model).active
    assert "activation_swap.core.install" not in sys.modules


def test_explain_makes_the_checks_of_a_policy(model: Any) -> None:
    assert not registry.explain(model, policy=SwapPolicy(min_bytes=-1)).supported

    registry.apply("attention", model, policy=SwapPolicy(min_bytes=3))
    assert registry.explain(model, policy=SwapPolicy(min_bytes=3)).supported
    (rejection,) = registry.explain(model, policy=SwapPolicy(min_bytes=4)).rejections
    assert rejection.code == "AS301"


def test_applying_again_without_the_first_handle_finds_the_installation(model: Any) -> None:
    registry.apply("attention", model)
    gc.collect()
    hooks = hook_count(model)

    swap = registry.apply("attention", model)

    assert hook_count(model) == hooks
    assert swap.active
    swap.remove()
    assert hook_count(model) == 0


def test_a_removed_swap_is_not_used_again(model: Any) -> None:
    first = registry.apply("attention", model)
    first.remove()

    second = registry.apply("attention", model, policy=SwapPolicy(min_bytes=1))

    assert second is not first
    assert second.active
    assert not first.active


def test_two_models_have_two_swaps_and_a_new_model_has_none(model: Any) -> None:
    other = tiny_model()

    assert registry.apply("attention", model) is not registry.apply("attention", other)
    assert hook_count(tiny_model()) == 0


def test_a_copy_of_a_swapped_model_is_not_swapped(model: Any) -> None:
    swap = registry.apply("attention", model)

    assert registry.apply("attention", copy.deepcopy(model)) is not swap


def test_explain_changes_nothing_and_knows_a_live_swap(model: Any) -> None:
    assert fqns(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert hook_count(model) == 0
    registry.apply("attention", model, policy=SwapPolicy(min_bytes=3))
    assert len(fqns(model)) == 2


def test_the_core_is_not_asked_for_more_than_the_attention(model: Any) -> None:
    layer = registry.explain(model).sites[1]

    assert layer.module is model.model.layers[1].self_attn
    assert layer.owners == (model, model.model, model.model.layers[1])
    assert layer.checkpoint_flag_owner is model.model.layers[1]
    assert layer.cache_arguments == ("cache", "past_key_values", "past_key_value")
    assert layer.returns == 2


def test_dense_layers_are_swapped_like_moe_layers() -> None:
    from transformers import Qwen3MoeForCausalLM

    config = tiny_model().config
    config.mlp_only_layers = [0]

    assert len(fqns(Qwen3MoeForCausalLM(config))) == 2


def prune(first: int, last: int, *, layers: str = "list") -> Any:
    """Return a stage of a model of four layers that holds layers first to last."""
    from transformers import Qwen3MoeForCausalLM

    config = tiny_model().config
    config.num_hidden_layers = 4
    stage = Qwen3MoeForCausalLM(config)
    kept = dict(list(enumerate(stage.model.layers))[first : last + 1])
    if layers == "list":
        stage.model.layers = nn.ModuleList(kept.values())
    elif layers == "dict":
        stage.model.layers = nn.ModuleDict({str(index): layer for index, layer in kept.items()})
    else:
        placeholder = nn.Identity() if layers == "identity" else None
        for index in range(4):
            if index not in kept:
                stage.model.layers._modules[str(index)] = placeholder
    if first > 0:
        stage.model.embed_tokens = None
    if last < 3:
        stage.model.norm = nn.Identity()
        stage.lm_head = None
    return stage


@pytest.mark.parametrize("pruned", ["list", "dict", "identity", "none"])
def test_a_pruned_stage(pruned: str) -> None:
    stage = prune(2, 3, layers=pruned)
    first = 0 if pruned == "list" else 2

    assert fqns(stage, PIPELINE) == [f"model.layers.{i}.self_attn" for i in (first, first + 1)]
    swap = registry.apply("attention", stage, setup=PIPELINE)
    assert swap.active
    assert registry.apply("attention", stage, setup=PIPELINE) is swap


def test_a_pruned_stage_needs_a_pipeline() -> None:
    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", prune(0, 1))

    assert refusal.value.reason is Reason.LAYER_COUNT
    assert "pp_size" in refusal.value.fix


def test_several_stages_are_named_by_their_place() -> None:
    stages = [prune(0, 0), prune(2, 3)]

    sites = registry.explain(stages, setup=PIPELINE).sites
    assert [site.stage for site in sites] == [0, 1, 1]
    assert fqns(stages, PIPELINE) == [
        "stages[0].model.layers.0.self_attn",
        "stages[1].model.layers.0.self_attn",
        "stages[1].model.layers.1.self_attn",
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("spoil", "reason", "part"),
    [
        (
            lambda layer: setattr(layer.self_attn, "q_norm", None),
            Reason.ATTENTION_PARTS,
            "layers.1.self_attn",
        ),
        (lambda layer: layer.compile(), Reason.COMPILED_MODEL, "layers.1"),
    ],
    ids=["by the adapter", "by a common check"],
)
def test_a_refused_stage_is_named_by_its_place(
    place: int, spoil: Callable[[Any], None], reason: Reason, part: str
) -> None:
    stages = [prune(0, 1), prune(2, 3)]
    spoil(stages[place].model.layers[1])

    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", stages, setup=PIPELINE)

    assert refusal.value.reason is reason
    assert refusal.value.where == f"stages[{place}].model.{part}"
    assert hook_count(stages[0]) == hook_count(stages[1]) == 0


@pytest.mark.parametrize(
    "layers", [nn.ModuleList(), nn.ModuleDict(), nn.ModuleList([nn.Identity()])]
)
def test_a_stage_without_attention_is_a_logged_no_op(
    layers: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    stage = tiny_model()
    stage.model.layers = layers

    with caplog.at_level(logging.INFO, logger="activation_swap"):
        swap = registry.apply("attention", stage, setup=PIPELINE)

    checks = registry.explain(stage, setup=PIPELINE).checks
    found = {check.subject: check.found for check in checks}
    assert found["layer_idx of the attention"] == "none here"
    assert not swap.active
    assert [record.getMessage() for record in caplog.records] == [
        "activation_swap: attention: no attention in the stages of this rank"
    ]


@pytest.mark.usefixtures("process_group")
def test_fully_shard_before_apply() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = tiny_model(), init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model).__name__ == "FSDPQwen3MoeForCausalLM"

    assert len(fqns(model)) == 2
    assert registry.apply("attention", model).active


@pytest.mark.usefixtures("process_group")
def test_ddp_is_told_to_pass_the_module_and_works_with_it(model: Any) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)

    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", wrapped)

    assert refusal.value.reason is Reason.WRAPPED_MODEL
    assert refusal.value.fix == "pass model.module"
    assert registry.apply("attention", wrapped.module).active


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.usefixtures("process_group")
def test_fsdp1_is_told_to_use_fully_shard(model: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(RejectedError) as refusal:
        registry.apply("attention", FullyShardedDataParallel(model, device_id=torch.device("cpu")))

    assert refusal.value.reason is Reason.UNSUPPORTED_WRAPPER
    assert refusal.value.fix == "use torch.distributed.fsdp.fully_shard, before or after apply"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_base_model_of_peft(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"]))

    assert len(fqns(adapted.get_base_model())) == 2


def test_checkpointing_and_compiling_the_moe_block_alone_is_fine(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[0].mlp = checkpoint_wrapper(model.model.layers[0].mlp)
    model.model.layers[1].mlp._compiled_call_impl = object()

    assert len(fqns(model)) == 2


def test_a_forward_left_behind_by_output_attentions_is_no_replacement(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward

    assert len(fqns(model)) == 2


def test_hooks_of_others_are_fine_whatever_they_are(model: Any) -> None:
    without_module: Any = dict.get
    assert not hasattr(without_module, "__module__")
    model.model.layers[0].register_forward_pre_hook(without_module)

    assert len(fqns(model)) == 2
