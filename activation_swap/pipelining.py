# SPDX-License-Identifier: Apache-2.0
"""For a pipeline scheduler of one's own: orders and plans as data, and what runs a plan.

Say in which order a rank computes, and lower it once with :func:`plan_rank`. In each training step
call :meth:`ScheduleRunner.begin_step` with that plan, and surround each compute call with
:meth:`ScheduleRunner.compute`, which calls the verbs of ``Swap.groups`` as planned. A schedule of
``torch.distributed.pipelining`` needs none of this: ``Swap.attach`` follows it.
"""

from __future__ import annotations

from activation_swap._verbs import GroupKey, GroupVerbs, Keep
from activation_swap.core.schedule.actions import (
    Action,
    ComputeOrder,
    Kind,
    LoweredStep,
    Step,
    format_plan,
    parse_plan,
)
from activation_swap.core.schedule.grid import format_grid
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.orders import gpipe_order, one_f_one_b_order
from activation_swap.core.schedule.runner import ScheduleRunner
from activation_swap.core.schedule.validation import validate

__all__ = [
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
