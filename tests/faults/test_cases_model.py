# SPDX-License-Identifier: Apache-2.0
"""Field cases on what happens to a model around apply: C34, C40, C42, C44, C46, C47."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from activation_swap import registry
from activation_swap.errors import RejectedError
from tests.faults.harness import apply, at_base, one_rank
from tests.models import (
    EVERYTHING,
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


@pytest.mark.parametrize("norms", ["plain-norms", "sequence-parallel-norms"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_c34_saved_dtensors(tmp_path: Path, norms: str) -> None:
    """Attention under tensor parallelism saves DTensors: their local tensors move.

    One rank here; tests/compose runs it on several, and with FSDP2.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plain, model = twins(attention="sdpa")
    swap: Any = None
    with one_rank(tmp_path) as mesh:
        found = []
        for one in (plain, model):
            for layer in one.model.layers:
                styles: dict[str, Any] = {
                    "q_proj": ColwiseParallel(use_local_output=False),
                    "k_proj": ColwiseParallel(use_local_output=False),
                    "v_proj": ColwiseParallel(),
                    "o_proj": RowwiseParallel(),
                }
                if norms == "sequence-parallel-norms":
                    styles |= {
                        "q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
                        "k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
                    }
                else:
                    styles |= {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel()}
                parallelize_module(layer.self_attn, mesh, styles)
            if one is model:
                swap = apply(model)
            found.append(step(one, tokens(one)))
        assert any(isinstance(g, DTensor) for g in found[0].gradients.values())
        local = [
            Step(
                one.loss,
                {
                    name: g.to_local() if isinstance(g, DTensor) else g
                    for name, g in one.gradients.items()
                },
            )
            for one in found
        ]
        assert difference(local[1], local[0]) is None
        assert swap.stats().saved_bytes > 0
        assert at_base(swap)


def names(model: Any) -> dict[str, list[Any]]:
    """Return every name of a model, in order, and the class of every module."""
    return {
        "state": [(k, tuple(v.shape)) for k, v in model.state_dict().items()],
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [(name, type(module)) for name, module in model.named_modules()],
    }


RELOAD = """
import sys, torch
from transformers import Qwen3MoeForCausalLM
assert "activation_swap" not in sys.modules
torch.set_num_threads(1)
model = Qwen3MoeForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
with torch.no_grad():
    logits = model(torch.arange(12)[None], use_cache=False).logits
torch.save(logits, sys.argv[2])
"""


def test_c40_names_are_unchanged(tmp_path: Path) -> None:
    """In memory, in the saved file, and in a process that knows nothing of the package."""
    from safetensors import safe_open

    plain, model = twins()
    before = names(model)
    swap = apply(model)
    step(model, tokens(model))
    assert names(model) == before
    model.zero_grad()
    for one, folder in ((plain, "plain"), (model, "swapped")):
        one.save_pretrained(tmp_path / folder)
    keys = []
    for folder in ("plain", "swapped"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            keys.append(list(file.keys()))
    assert keys[0] == keys[1]
    target = tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, "-c", RELOAD, str(tmp_path / "swapped"), str(target)],
        check=True,
        capture_output=True,
    )
    with torch.no_grad():
        expected = plain.eval()(torch.arange(12)[None], use_cache=False).logits
    assert torch.equal(torch.load(target, weights_only=True), expected)
    swap.remove()
    assert names(model) == before


# Newer releases of Transformers rename what PEFT asks for.
PEFT = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def lora(model: Any, name: str = "default") -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(
        model,
        LoraConfig(target_modules=targets, r=4, init_lora_weights=False),
        adapter_name=name,
    )


@PEFT
@pytest.mark.parametrize("order", ["apply-first", "lora-first"])
def test_c42_lora(order: str) -> None:
    plain, model = twins(attention="sdpa")
    plain = lora(plain)
    if order == "apply-first":
        swap = apply(model)
        model = lora(model)
    else:
        model = lora(model)
        swap = apply(model.get_base_model(), EVERYTHING)
    assert names(model) == names(plain)
    expected = step(plain, tokens(plain))
    assert any("lora" in name for name in expected.gradients)
    assert difference(step(model, tokens(model)), expected) is None
    assert swap.stats().saved_bytes > 0
    assert at_base(swap)


@PEFT
def test_c42_a_peft_model_itself_is_refused_with_the_way_in() -> None:
    model = lora(build())
    with pytest.raises(RejectedError, match=r"get_base_model\(\)"):
        apply(model)


@PEFT
@pytest.mark.filterwarnings("ignore:.*moved nothing:RuntimeWarning")
def test_c42_adapters_change_in_mid_run() -> None:
    """Merged, unmerged, disabled, switched, deleted: equal after each."""
    from peft import LoraConfig

    plain, model = lora(build(attention="sdpa")), lora(build(attention="sdpa"))
    swap = apply(model.get_base_model(), EVERYTHING)

    def both(change: Callable[[Any], Any]) -> None:
        for one in (plain, model):
            torch.manual_seed(8)
            change(one)

    def same_loss() -> bool:
        return torch.equal(forward(model, tokens(model)).loss, forward(plain, tokens(plain)).loss)

    both(lambda m: m.merge_adapter())
    assert same_loss()  # merged, nothing is left to train
    changes: list[Callable[[Any], Any]] = [
        lambda m: m.unmerge_adapter(),
        lambda m: m.add_adapter("two", LoraConfig(target_modules=["q_proj"], r=2)),
        lambda m: m.set_adapter("two"),
        lambda m: m.set_adapter("default"),
        lambda m: m.delete_adapter("two"),
    ]
    for change in changes:
        both(change)
        swap.reset_stats()
        assert difference(step(model, tokens(model)), step(plain, tokens(plain))) is None
        assert swap.stats().saved_bytes > 0
        assert at_base(swap)
    with plain.disable_adapter(), model.disable_adapter():
        assert same_loss()


@pytest.mark.parametrize("router", [False, True], ids=["plain", "router-logits"])
@pytest.mark.parametrize(
    "structure",
    [
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 1, 2]},
        {"tie_word_embeddings": True},
    ],
    ids=["first-dense", "every-second", "all-dense", "tied"],
)
def test_c44_dense_layers_among_moe_layers(structure: dict[str, Any], *, router: bool) -> None:
    plain, model = twins(output_router_logits=router, **structure)
    try:
        expected = step(plain, tokens(plain))
    except (IndexError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        # Where the un-swapped model fails, the same error appears.
        apply(model)
        with pytest.raises(type(error)):
            step(model, tokens(model))
        return
    swap = apply(model)
    assert difference(step(model, tokens(model)), expected) is None
    stats = swap.stats()
    assert stats.saved_bytes > 0
    assert stats.offloaded_storages % 2 == 0


@pytest.mark.parametrize("order", ["apply-first", "prepare-first"])
@pytest.mark.filterwarnings("ignore:.*(torch_dtype|pin_memory):")
def test_c46_prepare_and_unwrap(order: str) -> None:
    """Accelerate rebinds ``forward`` of the model; the swap sits on the attentions."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # A singleton of the process: another test may have asked for another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)

    def run(model: Any, *, swapped: bool) -> tuple[list[Step], Any]:
        swap = apply(model) if swapped and order == "apply-first" else None
        prepared = accelerator.prepare_model(model)
        if swapped and swap is None:
            swap = apply(model)
        found = [step(prepared, tokens(model))]
        moved = None if swap is None else swap.stats().saved_bytes
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        found.append(step(unwrapped, tokens(model)))
        if swap is not None:
            assert swap.active
            assert moved
            assert swap.stats().saved_bytes > moved
        return found, swap

    plain, model = twins(attention="sdpa")
    expected, _ = run(plain, swapped=False)
    found, swap = run(model, swapped=True)
    assert difference(found, expected) is None
    assert at_base(swap)


def test_c46_hooks_of_accelerate_on_one_attention() -> None:
    """They replace its forward: before apply that is refused, after apply it works."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    plain, model = twins()
    expected = step(plain, tokens(plain))
    attention = model.model.layers[1].self_attn
    add_hook_to_module(attention, ModelHook())
    with pytest.raises(RejectedError, match=r"layers\.1\.self_attn"):
        apply(model)
    remove_hook_from_module(attention)
    attention.__dict__.pop("forward", None)
    swap = apply(model)
    add_hook_to_module(attention, ModelHook())
    assert difference(step(model, tokens(model)), expected) is None
    remove_hook_from_module(attention)
    assert difference(step(model, tokens(model)), expected) is None
    assert swap.stats().saved_bytes > 0


def hooks(model: Any) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_c47_applied_many_times(times: int) -> None:
    plain, model = twins()
    first = apply(model)
    before = hooks(model)
    swaps = {id(apply(model)) for _ in range(times - 1)} | {id(first)}
    assert swaps == {id(first)}
    assert hooks(model) == before
    assert sum(pre for pre, _ in before) == sum(post for _, post in before) == 3
    assert difference(step(model, tokens(model)), step(plain, tokens(plain))) is None
    per_layer = first.stats().offloaded_bytes
    assert per_layer == once()


def once() -> int:
    model = build()
    swap = apply(model)
    step(model, tokens(model))
    return swap.stats().offloaded_bytes


def test_c47_inner_model_other_models_and_none() -> None:
    """No other model is touched; ``none`` does not undo, and says so."""
    model, other = twins()
    swap = apply(model)
    with pytest.raises(RejectedError, match="Qwen3MoeModel"):
        apply(model.model, EVERYTHING)
    assert sum(pre for pre, _ in hooks(other)) == 0
    second = apply(other)
    assert second is not swap
    with pytest.warns(UserWarning, match="does not undo"):
        assert not registry.apply("none", model).active
    assert swap.active
    swap.remove()
    assert second.active
    fresh = build()
    assert sum(pre for pre, _ in hooks(fresh)) == 0
    assert difference(step(other, tokens(other)), step(fresh, tokens(fresh))) is None
    assert second.stats().saved_bytes > 0
    assert gradients(model) == {}
