# SPDX-License-Identifier: Apache-2.0
"""Reading torch's schedules, and attaching to their stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from activation_swap._site import Site
from activation_swap.core.hooked_site import HookedSite
from activation_swap.core.schedule.liveness import find_order_problem
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.torch_orders import compute_orders, read_order
from activation_swap.core.schedule.torch_pipelining import Attachment, attach
from activation_swap.core.schedule.validation import validate
from activation_swap.errors import ActivationSwapError, Reason
from tests.schedule.fake_world import SCHEDULES, Attention, build_schedule, fake_world
from tests.schedule.recording_verbs import RecordingVerbs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

CsvForm = Literal["compute_only", "compute_comms"]
METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def sites_of(schedule: Any) -> tuple[HookedSite, ...]:
    return tuple(
        HookedSite(Site(fqn=f"{stage.stage_index}.{name}", module=module))
        for stage in stages_of(schedule)
        for name, module in stage.submod.named_modules()
        if isinstance(module, Attention)
    )


def attached(schedule: Any, verbs: RecordingVerbs | None = None) -> Attachment:
    sites = sites_of(schedule)
    return attach(schedule, verbs or RecordingVerbs(), sites=sites, recorded=range(len(sites)))


@pytest.mark.parametrize(("size", "microbatches"), [(1, 4), (2, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_is_read_and_computed_alike(name: str, size: int, microbatches: int) -> None:
    computed = compute_orders(
        name, pp_size=size, microbatches=microbatches, stages_per_rank=SCHEDULES[name]
    )
    assert sorted(computed) == list(range(size))
    for rank in range(size):
        with fake_world(rank, size):
            schedule = build_schedule(name, rank=rank, size=size, microbatches=microbatches)
            order = read_order(schedule)
        assert order is not None
        assert order == computed[rank]
        assert find_order_problem(order) is None
        attentions = {member.stage: 4 for step in order for member in step.members}
        validate(plan_rank(order, attentions=attentions))
        if name != "1F1B":
            listed = schedule.pipeline_order[rank]
            compute = [str(action) for action in listed if action and action.is_compute_op]
            assert [str(step) for step in order] == compute


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_an_order_loaded_from_csv_is_read(form: CsvForm, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for rank in range(2):
        with fake_world(rank, 2):
            schedule = build_schedule("Interleaved1F1B", rank=rank, size=2, microbatches=4)
            order = read_order(schedule)
            schedule._dump_csv(str(file), form)
            loaded = _PipelineScheduleRuntime(
                schedule._stages, n_microbatches=4, loss_fn=nn.MSELoss()
            )
            assert read_order(loaded) is None
            loaded._load_csv(str(file), form)
            assert read_order(loaded) == order


class Custom1F1B(Schedule1F1B):
    """A schedule with a loop of its own: its listed order says nothing about it."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        return super()._step_microbatches(*args, **kwargs)


def test_the_order_of_an_unknown_loop_is_unknown() -> None:
    with fake_world(0, 2):
        known = build_schedule("1F1B", rank=0, size=2, microbatches=4)
        unknown = Custom1F1B(known._stage, n_microbatches=4, loss_fn=nn.MSELoss())
    assert read_order(known) is not None
    assert read_order(unknown) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_detach_restores_the_stages(name: str) -> None:
    with fake_world(0, 2):
        schedule = build_schedule(name, rank=0, size=2, microbatches=4)
    before = [dict(vars(stage)) for stage in stages_of(schedule)]
    own = dict(vars(schedule))
    attachment = attached(schedule)
    assert vars(schedule) == own
    for stage in stages_of(schedule):
        assert all(name in vars(stage) for name in METHODS)
    attachment.detach()
    attachment.detach()
    assert [dict(vars(stage)) for stage in stages_of(schedule)] == before
    attached(schedule).detach()


def test_detach_leaves_the_wrappers_of_others() -> None:
    with fake_world(0, 2):
        schedule = build_schedule("GPipe", rank=0, size=2, microbatches=4)
    stage = schedule._stage
    calls: list[str] = []

    def earlier() -> None:
        calls.append("earlier")

    def compute(microbatch: int) -> None:
        calls.append(f"compute {microbatch}")

    stage.clear_runtime_states = earlier
    stage.forward_one_chunk = compute
    verbs = RecordingVerbs()
    attachment = attached(schedule, verbs)
    inner = stage.forward_one_chunk

    def later(*args: Any, **kwargs: Any) -> Any:
        calls.append("later")
        return inner(*args, **kwargs)

    stage.forward_one_chunk = later
    attachment.detach()
    assert stage.clear_runtime_states is earlier
    assert stage.forward_one_chunk is later
    stage.forward_one_chunk(3)
    assert calls == ["later", "compute 3"]
    assert verbs.log == []


OUTSIDE = nn.Linear(2, 2)
ELSEWHERE = HookedSite(Site(fqn="elsewhere", module=OUTSIDE))


def test_a_swap_of_other_modules_is_refused() -> None:
    with fake_world(0, 2):
        schedule = build_schedule("GPipe", rank=0, size=2, microbatches=4)
    assert_refused(Reason.SCHEDULE_MISSES_SITES, schedule, (*sites_of(schedule), ELSEWHERE))


def test_a_swap_of_nothing_is_refused() -> None:
    with fake_world(0, 2):
        schedule = build_schedule("GPipe", rank=0, size=2, microbatches=4)
    assert_refused(Reason.SCHEDULE_MISSES_SITES, schedule, ())


def test_a_second_attachment_is_refused() -> None:
    with fake_world(0, 2):
        schedule = build_schedule("GPipe", rank=0, size=2, microbatches=4)
        again = ScheduleGPipe(schedule._stage, n_microbatches=2, loss_fn=nn.MSELoss())
    attached(schedule)
    assert_refused(Reason.SCHEDULE_ATTACHED, again, sites_of(again))


def test_something_else_is_refused() -> None:
    with pytest.raises(ActivationSwapError) as caught:
        attach(object(), RecordingVerbs(), sites=(ELSEWHERE,), recorded={0})
    assert caught.value.reason is Reason.NOT_A_SCHEDULE


def assert_refused(reason: Reason, schedule: Any, sites: tuple[HookedSite, ...]) -> None:
    before = [dict(vars(stage)) for stage in stages_of(schedule)]
    with pytest.raises(ActivationSwapError) as caught:
        attach(schedule, RecordingVerbs(), sites=sites, recorded=range(len(sites)))
    assert caught.value.reason is reason
    assert [dict(vars(stage)) for stage in stages_of(schedule)] == before
