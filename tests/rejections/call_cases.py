# SPDX-License-Identifier: Apache-2.0
"""Refusals of everything but apply: registering, training, driving a schedule, the trainer."""

from __future__ import annotations

import functools
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import checkpoint

from activation_swap import Registry, registry, testing
from activation_swap._site import Site
from activation_swap.adapters import BUILT_IN
from activation_swap.adapters.qwen3_moe import Qwen3MoeAttention
from activation_swap.core.hooked_site import HookedSite
from activation_swap.errors import Reason
from activation_swap.pipelining import Action, Kind, ScheduleRunner, gpipe_order, plan_rank
from tests.rejections import trainer_calls
from tests.rejections.case import EVERYTHING, PIPELINE, CallCase
from tests.rejections.site_cases import checkpointing


def train(model: Any) -> torch.Tensor:
    tokens = torch.arange(8).reshape(1, 8)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def swapped(model: Any) -> Any:
    registry.apply("attention", model, policy=EVERYTHING)
    return model


def register_nothing(_: Any) -> None:
    Registry().register(SimpleNamespace(mode="attention"))


def register_twice(_: Any) -> None:
    Registry((*BUILT_IN, Qwen3MoeAttention(transformers_version="5.0.0")))


def break_the_contract(model: Any) -> None:
    testing.check_adapter(BUILT_IN[0], lambda: nn.Linear(1, 1), lambda _: train(model))


def load_broken_entry_point(_: Any) -> None:
    import sys

    with trainer_calls.directory() as path:
        info = path / "broken-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[activation_swap.adapters]\na = json:nothing\n")
        sys.path.insert(0, str(path))
        try:
            _, broken = Registry().explain(nn.Identity()).rejections
            raise broken
        finally:
            sys.path.remove(str(path))


def return_three(model: Any) -> None:
    model.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: (*output, None))
    train(swapped(model))


def checkpoint_later(model: Any) -> None:
    checkpointing(swapped(model))
    train(model)


def recompute_by_hand(model: Any, *, reentrant: bool) -> None:
    """Recompute a layer as a trainer would that knows no flag of Transformers."""
    layer = swapped(model).model.layers[1]
    original = layer.forward

    def forward(hidden_states: torch.Tensor, **arguments: Any) -> Any:
        return checkpoint(
            functools.partial(original, **arguments), hidden_states, use_reentrant=reentrant
        )

    layer.forward = forward
    train(model).backward()


def compile_later(model: Any) -> None:
    swapped(model).model.layers[1].compile()
    with torch.compiler.set_stance("force_eager"):  # as compiled, without the minutes
        train(model)


def disable_hooks(model: Any) -> None:
    swapped(model)
    with disable_saved_tensors_hooks("no hooks here"):
        train(model)


def call_a_replica(model: Any) -> None:
    """What nn.DataParallel does on each of several devices."""
    layer = swapped(model).model.layers[0]
    layer.self_attn = layer.self_attn._replicate_for_data_parallel()
    train(model)


def call_a_shallow_copy(model: Any) -> None:
    layer = swapped(model).model.layers[0]
    layer.self_attn = copy(layer.self_attn)
    train(model)


def hook_outside(model: Any) -> None:
    swapped(model)
    with save_on_cpu():
        train(model)


def capture(model: Any) -> None:
    from activation_swap.core.host_transfer import HostTransfer

    swapped(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "capturing", lambda _: True)
        train(model)


def nest(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    swapped(model)
    arguments: dict[str, Any] = {}
    hook = second.register_forward_pre_hook(
        lambda _, __, given: arguments.update(given), with_kwargs=True
    )
    train(model)
    hook.remove()

    def call_second(*_: Any) -> None:
        with save_on_cpu():
            second(**arguments)

    first.q_proj.register_forward_pre_hook(call_second)
    train(model)


def change_in_place(model: Any) -> None:
    attention = swapped(model).model.layers[1].self_attn
    outputs: list[torch.Tensor] = []
    attention.q_proj.register_forward_hook(lambda _, __, output: outputs.append(output))
    loss = train(model)
    with torch.no_grad():
        outputs[0].zero_()
    loss.backward()


def step_backwards(model: Any) -> None:
    from activation_swap.core.group import Group, GroupState
    from activation_swap.core.install import find_installation

    installation = find_installation(swapped(model).modules())
    assert installation is not None
    link = installation._links.of(torch.device("cpu"))
    group = Group(installation._engine, fqn="attention", index=0, link=link, previous=None)
    group.move_to(GroupState.RECORDING)


def parse_nonsense(_: Any) -> None:
    from activation_swap.core.schedule.actions import parse_plan

    parse_plan("1X0")


def order_nonsense(_: Any) -> None:
    from activation_swap.core.schedule.actions import parse_plan
    from activation_swap.core.schedule.liveness import find_chunks

    find_chunks(tuple(lowered.step for lowered in parse_plan("0F0 0B0 0B0")))


def plan_nonsense(_: Any) -> None:
    from activation_swap.core.schedule.actions import parse_plan
    from activation_swap.core.schedule.validation import validate

    validate(parse_plan("0SET_GROUP0 0F0 0OFFLOAD0 0WAIT_OFFLOAD0 0B0"), rank=1)


def deadlock(_: Any) -> None:
    from activation_swap.core.schedule.actions import parse_plan
    from activation_swap.trainer.pipeline_time import simulate_time

    orders = {
        0: tuple(lowered.step for lowered in parse_plan("0F0 0B0 0F1 0B1")),
        1: tuple(lowered.step for lowered in parse_plan("1F1 1F0 1B1 1B0")),
    }
    simulate_time(orders, lambda _: 1.0)


def impossible_shape(_: Any) -> None:
    from activation_swap.core.schedule.torch_orders import compute_orders

    compute_orders("1F1B", pp_size=2, microbatches=1, stages_per_rank=1)


def attach_twice(_: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from activation_swap.core.schedule.torch_pipelining import attach
    from tests.schedule.fake_world import fake_world
    from tests.schedule.recording_verbs import RecordingVerbs

    with fake_world(0, 2):
        stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"))
        schedules = [ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss()) for _ in range(2)]
    sites = (HookedSite(Site(fqn="stage", module=stage.submod)),)
    for schedule in schedules:
        attach(schedule, RecordingVerbs(), sites=sites, recorded={0})


def attach_elsewhere(model: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from tests.schedule.fake_world import fake_world

    swap = registry.apply("attention", model, setup=PIPELINE)
    with fake_world(0, 2):
        stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    swap.attach(schedule)


def attach_nothing(model: Any) -> None:
    registry.apply("attention", model, setup=PIPELINE).attach(object())


def attach_without_pipeline(model: Any) -> None:
    registry.apply("attention", model).attach(object())


def groups_without_pipeline(model: Any) -> None:
    registry.apply("attention", model).groups.set_group((0, 0))


def never_attach(model: Any) -> None:
    registry.apply("attention", model, setup=PIPELINE)
    train(model)


def wait_before_launch(model: Any) -> None:
    swap = registry.apply("attention", model, setup=PIPELINE)
    swap.groups.wait_reload((0, 1))


def name_no_chunk(model: Any) -> None:
    swap = registry.apply("attention", model, setup=PIPELINE)
    swap.groups.set_group((0,))  # type: ignore[arg-type]


def plan_an_order_without_its_stage(_: Any) -> None:
    plan_rank(gpipe_order(stage=1, microbatches=2), attentions={0: 3})


def compute_before_a_step(model: Any) -> None:
    swap = registry.apply("attention", model, setup=PIPELINE)
    with ScheduleRunner(swap.groups).compute(Action(0, Kind.FORWARD, 0)):
        train(model)


CALL_CASES = (
    CallCase(Reason.INVALID_ADAPTER, "adapter-invalid", register_nothing),
    CallCase(Reason.DUPLICATE_ADAPTER, "adapter-twice", register_twice),
    CallCase(Reason.BROKEN_ENTRY_POINT, "adapter-entry-point-broken", load_broken_entry_point),
    CallCase(Reason.ADAPTER_CONTRACT, "adapter-breaks-its-contract", break_the_contract),
    CallCase(Reason.RETURN_ARITY, "attention-returns-three", return_three),
    CallCase(Reason.INVALID_CONFIG, "config-illegal", trainer_calls.illegal_config),
    CallCase(
        Reason.INVALID_CONFIG,
        "config-pipeline-with-checkpoints",
        trainer_calls.config_of_no_pipeline,
    ),
    CallCase(Reason.UNREADABLE_CONFIG, "config-unreadable", trainer_calls.unreadable_config),
    CallCase(Reason.DEVICE_UNAVAILABLE, "device-absent", trainer_calls.absent_device),
    CallCase(Reason.UNREADABLE_MODEL, "model-unreadable", trainer_calls.unreadable_model),
    CallCase(
        Reason.NO_EXPERTS_CHOICE, "experts-no-choice", trainer_calls.experts_of_an_old_release
    ),
    CallCase(Reason.TIED_EMBEDDING, "embedding-tied", trainer_calls.tied_embedding),
    CallCase(Reason.NO_TRAINING_DATA, "data-absent", trainer_calls.no_data),
    CallCase(
        Reason.UNREADABLE_TOKENIZER, "tokenizer-unreadable", trainer_calls.unreadable_tokenizer
    ),
    CallCase(Reason.VOCABULARY_TOO_SMALL, "vocabulary-small", trainer_calls.small_vocabulary),
    CallCase(
        Reason.EARLIER_RUN_IN_THE_WAY,
        "earlier-run-in-the-way",
        trainer_calls.earlier_run_in_the_way,
    ),
    CallCase(Reason.DAMAGED_CHECKPOINT, "checkpoint-damaged", trainer_calls.damaged_checkpoint),
    CallCase(Reason.OTHER_TRAJECTORY, "checkpoint-of-another-run", trainer_calls.other_trajectory),
    CallCase(Reason.NO_RANKS, "pipeline-without-ranks", trainer_calls.pipeline_without_ranks),
    CallCase(Reason.RESUME_UNDER_PIPELINE, "pipeline-resumed", trainer_calls.resume_a_pipeline),
    CallCase(Reason.OUTPUT_UNWRITABLE, "output-unwritable", trainer_calls.unwritable_output),
    CallCase(Reason.OUTPUT_UNWRITABLE, "output-of-other-files", trainer_calls.metrics_directory),
    CallCase(Reason.OUTPUT_IN_USE, "output-in-use", trainer_calls.output_in_use),
    CallCase(Reason.RUN_BROKE_OFF, "checkpoint-unwritable", trainer_calls.unwritable_checkpoint),
    CallCase(
        Reason.EARLIER_RUN_IN_THE_WAY,
        "earlier-metrics-in-the-way",
        trainer_calls.earlier_metrics_in_the_way,
    ),
    CallCase(Reason.DAMAGED_CHECKPOINT, "checkpoint-renamed", trainer_calls.renamed_checkpoint),
    CallCase(Reason.UNREADABLE_METRICS, "metrics-unreadable", trainer_calls.unreadable_metrics),
    CallCase(Reason.TRAINER_EXTRA_MISSING, "trainer-extra-missing", trainer_calls.missing_extra),
    CallCase(Reason.SCHEDULE_TEXT, "schedule-text", parse_nonsense),
    CallCase(Reason.SCHEDULE_ORDER, "schedule-order", order_nonsense),
    CallCase(Reason.SCHEDULE_PLAN, "schedule-plan", plan_nonsense),
    CallCase(Reason.SCHEDULE_MISSES_SITES, "schedule-of-other-stages", attach_elsewhere),
    CallCase(Reason.SCHEDULE_ATTACHED, "schedule-attached-twice", attach_twice),
    CallCase(Reason.NOT_A_SCHEDULE, "schedule-is-none", attach_nothing),
    CallCase(Reason.SCHEDULE_DEADLOCK, "schedule-deadlock", deadlock),
    CallCase(Reason.NO_SUCH_PIPELINE, "schedule-shape", impossible_shape),
    CallCase(Reason.GROUP_STATE, "chunk-waited-for-before-launch", wait_before_launch),
    CallCase(Reason.NOT_A_CHUNK, "chunk-without-microbatch", name_no_chunk),
    CallCase(Reason.PIPELINE_ARGUMENT, "stage-without-attentions", plan_an_order_without_its_stage),
    CallCase(Reason.STEP_NOT_BEGUN, "step-never-begun", compute_before_a_step),
    CallCase(Reason.SCHEDULE_NOT_ATTACHED, "schedule-never-attached", never_attach),
    CallCase(Reason.WITHOUT_PIPELINE, "attached-without-pipeline", attach_without_pipeline),
    CallCase(Reason.WITHOUT_PIPELINE, "groups-without-pipeline", groups_without_pipeline),
    CallCase(Reason.CHECKPOINTING_ENABLED_LATER, "checkpointing-later", checkpoint_later),
    CallCase(
        Reason.CHECKPOINTING_ENABLED_LATER,
        "recomputed-by-hand",
        lambda model: recompute_by_hand(model, reentrant=False),
    ),
    CallCase(
        Reason.CHECKPOINTING_ENABLED_LATER,
        "recomputed-by-hand-reentrant",
        lambda model: recompute_by_hand(model, reentrant=True),
    ),
    CallCase(Reason.COMPILED_LATER, "compiled-later", compile_later),
    CallCase(Reason.SAVED_TENSOR_CHANGED, "saved-tensor-changed", change_in_place),
    CallCase(Reason.ILLEGAL_TRANSITION, "group-steps-backwards", step_backwards),
    CallCase(Reason.OUTER_HOOKS, "outer-hooks", hook_outside),
    CallCase(Reason.GRAPH_CAPTURE, "graph-capture", capture),
    CallCase(Reason.NESTED_ATTENTION, "nested-attention", nest),
    CallCase(Reason.HOOKS_DISABLED, "hooks-disabled", disable_hooks),
    CallCase(Reason.SHALLOW_COPY, "data-parallel-replica", call_a_replica),
    CallCase(Reason.SHALLOW_COPY, "shallow-copy", call_a_shallow_copy),
)
