# SPDX-License-Identifier: Apache-2.0
"""What users could take instead, on the same model: each peer's own code, driven as it asks for.

No peer is part of this project. Those that are packages are looked for where packages are
installed; the one module that holds the engine is loaded by its path, since the packages around it
import much that has nothing to do with offloading. What that module imports from its own package
and does not use here is stood in for, and listed where it is.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

__all__ = ["NOT_RUN", "PEERS", "Applied", "NotRunError"]

NOT_RUN: Final[Mapping[str, str]] = {
    "Hyper-Parallel (mindspore-ai)": "on no package registry",
    "TransformerEngine's cpu_offload": (
        "its PyTorch part is published as sources that need CUDA, cuDNN and a compiler to build; "
        "it offloads inside TransformerEngine's own layers, not inside these modules"
    ),
    "torchtune's OffloadActivations, whole model": (
        "it tells parameters by type, so that the transposed views of all expert weights (58 GB) "
        "would move, too: more than the host's memory. It is measured on the attentions alone"
    ),
}
"""Peers that no process can run, with the reason."""


class NotRunError(Exception):
    """The mode cannot run here; the message is the reason."""


@dataclass(kw_only=True)
class Applied:
    """A mode on a model.

    Attributes:
        around_step: Entered around forward and backward of a microbatch.
        around_forward: Entered around the forward alone.
        remove: Takes the mode off the model.
        stats: Returns the swap's counters, where the mode is this package's.
        reset_stats: Starts them anew.
        about: What a reader of the table must know.
    """

    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    remove: Callable[[], None] = lambda: None
    stats: Callable[[], Any] | None = None
    reset_stats: Callable[[], None] = lambda: None
    about: str = ""


@dataclass
class _Hooks:
    """Enters a context before each attention and leaves it after."""

    handles: list[Any] = field(default_factory=list)

    def around(self, module: torch.nn.Module, context: AbstractContextManager[Any]) -> None:
        def enter(*_: Any) -> None:
            context.__enter__()

        def leave(*_: Any) -> None:
            context.__exit__(None, None, None)

        self.handles += (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _attentions(model: Any) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def _save_on_cpu(model: Any, _policy: Mapping[str, Any]) -> Applied:
    hooks = _Hooks()
    pinned = next(model.parameters()).device.type != "cpu"
    for attention in _attentions(model):
        hooks.around(attention, torch.autograd.graph.save_on_cpu(pin_memory=pinned))
    about = "torch.autograd.graph.save_on_cpu(pin_memory=True) around every self_attn"
    return Applied(remove=hooks.remove, about=about)


def _checkpointing(model: Any, _policy: Mapping[str, Any]) -> Applied:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    about = "model.gradient_checkpointing_enable, not re-entrant: every decoder layer"
    return Applied(remove=model.gradient_checkpointing_disable, about=about)


def _trl(model: Any, _policy: Mapping[str, Any]) -> Applied:
    _needs_cuda(model)
    module = _load("trl", "models/activation_offloading.py")
    context = module.get_act_offloading_ctx_manager(model=model)
    # As in its SFTTrainer: around forward and backward, the output head left out.
    about = f"TRL {version('trl')} OffloadActivations, whole model, as its SFTTrainer uses it"
    return Applied(around_step=lambda: context, about=about)


def _torchtune(model: Any, _policy: Mapping[str, Any]) -> Applied:
    _needs_cuda(model)
    stand_ins: dict[str, dict[str, Any]] = {
        # Types that it tests for and a logger; none of them is met here.
        "torchao": {},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": lambda *_: SimpleNamespace(warning=lambda *_: None)},
    }
    module = _load("torchtune", "training/_activation_offloading.py", stand_ins)
    context = module.OffloadActivations()
    hooks = _Hooks()
    for attention in _attentions(model):
        hooks.around(attention, context)
    about = f"torchtune {version('torchtune')} OffloadActivations around every self_attn"
    return Applied(remove=hooks.remove, about=about)


def _megatron(model: Any, policy: Mapping[str, Any]) -> Applied:
    """Drive Megatron-Core's engine: start, context and commit around each attention.

    Its own check of parameters is by type and would move transposed views of the weights, too. Its
    own modules save none; these do, and are spared here.
    """
    _needs_cuda(model)
    stand_ins: dict[str, dict[str, Any]] = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.transformer": {},
        "megatron.core.extensions": {},
        "megatron.core.transformer.cuda_graphs": {"is_graph_capturing": lambda: False},
        "megatron.core.utils": {
            "nvtx_range_push": lambda *_: None,
            "nvtx_range_pop": lambda *_: None,
        },
        # Only a flag on it is set, for TransformerEngine's own layers.
        "megatron.core.extensions.transformer_engine": {"cpu_offload": SimpleNamespace()},
    }
    path = "core/pipeline_parallel/fine_grained_activation_offload.py"
    module = _load("megatron", path, stand_ins)
    module.print_offload_summary_table = lambda _: None  # it needs a process group
    interface = module.FineGrainedActivationOffloadingInterface
    manager = module.PipelineOffloadManager.get_instance()
    save = manager.on_save_for_backward

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if isinstance(tensor._base, torch.nn.Parameter) else save(tensor)  # noqa: SLF001

    manager._saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks(  # noqa: SLF001
        pack, manager.on_get_saved_tensor
    )
    elements = policy.get("min_bytes", 1024 * 1024) // 2
    forwards = [(attention, attention.forward) for attention in _attentions(model)]
    for attention, forward in forwards:
        attention.forward = _within(interface, forward)

    def remove() -> None:
        for attention, _ in forwards:
            del attention.forward

    @contextmanager
    def around_step() -> Iterator[None]:
        interface.init_chunk_handler(0, 1, None, elements, 0, 1.0)
        yield
        interface.reset()

    about = (
        f"Megatron-Core {version('megatron-core')} fine-grained offloading around every self_attn"
    )
    return Applied(around_step=around_step, remove=remove, about=about)


def _within(interface: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        scope = interface(True, hidden_states, "self_attn")
        with scope as tensor:
            result = forward(hidden_states=tensor, **arguments)
        return scope.group_offload(result)

    return run


PEERS: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], Applied]]] = {
    "save_on_cpu": _save_on_cpu,
    "checkpointing": _checkpointing,
    "megatron": _megatron,
    "trl": _trl,
    "torchtune": _torchtune,
}


def _needs_cuda(model: Any) -> None:
    if next(model.parameters()).device.type != "cuda":
        message = "it needs CUDA"
        raise NotRunError(message)


def _load(package: str, path: str, stand_ins: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Import one file of an installed package, without the package.

    Raises:
        NotRunError: The package is not installed, or the file needs more than is here.
    """
    spec = importlib.util.find_spec(package)
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    files = [root / path for root in roots if (root / path).is_file()]
    if not files:
        message = f"{package} is not installed, or has no {path}"
        raise NotRunError(message)
    for name, attributes in (stand_ins or {}).items():
        stand_in = ModuleType(name)
        stand_in.__dict__.update(attributes)
        sys.modules[name] = stand_in
    name = f"benchmarks_peer_{package}"
    module_spec = importlib.util.spec_from_file_location(name, files[0])
    if module_spec is None or module_spec.loader is None:
        message = f"{files[0]} is no Python module"
        raise NotRunError(message)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except ImportError as error:
        message = f"{package}: {error}"
        raise NotRunError(message) from error
    return module
