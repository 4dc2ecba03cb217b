# SPDX-License-Identifier: Apache-2.0
"""``activation-swap plan``: what a pipeline would gain, before anybody runs it."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from activation_swap._config import SwapPolicy
from activation_swap.core.schedule.grid import format_grid
from activation_swap.trainer.attention_bytes import AttentionBytes, AttentionShape
from activation_swap.trainer.config import ModelSection
from activation_swap.trainer.model import read_model_config, reading_model
from activation_swap.trainer.pipeline_plan import PipelineSetup, plan_pipeline
from activation_swap.trainer.stage_split import usual_stages_per_rank

if TYPE_CHECKING:
    import argparse

    from activation_swap.trainer.pipeline_plan import PipelinePlan, RankPlan

__all__ = ["add_arguments", "run"]

_GIB = 1024**3
_ITEMSIZE = {"bfloat16": 2, "float32": 4}
_TABLE_WIDTH = 150
# So that no product or quotient leaves what a float holds.
_DIGITS, _LARGE = 12, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--schedule", default="1F1B", help="name of a schedule of torch")
    pipeline.add_argument("--pp-size", type=_count, required=True, help="number of ranks")
    pipeline.add_argument("--microbatches", type=_count, required=True, help="per step")
    pipeline.add_argument(
        "--stages-per-rank", type=_count, help="default: 1 for GPipe and 1F1B, 2 for the others"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="qwen3-30b-a3b", help="preset, or a Hugging Face config.json"
    )
    for name, text in _OVERRIDES.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=_count, help=text)
    model.add_argument("--dtype", choices=_ITEMSIZE, default="bfloat16")
    model.add_argument("--tokens", type=_count, default=4096, help="tokens of one microbatch")
    model.add_argument(
        "--fraction", type=_part, default=1.0, help="part of the attentions that moves (default: 1)"
    )
    model.add_argument(
        "--other-bytes-per-token",
        type=_whole,
        default=0,
        help="what else a layer keeps on the device for backward",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--link-gbps",
        type=_positive,
        default=48.0,
        help="GB/s each way while both run (default: 48, measured on an H200)",
    )
    machine.add_argument(
        "--step-ms", type=_positive, help="measured time of a step without the swap"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--no-grid", action="store_true", help="leave the steps of each rank out")


_OVERRIDES = {
    "num_hidden_layers": "decoder layers",
    "hidden_size": "width of the model",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key and value heads",
    "head_dim": "width of a head",
}


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print.

    Raises:
        RejectedError: AS404 when the model cannot be read, AS508 when there is no such pipeline.
    """
    plan = plan_pipeline(_setup(arguments))
    if arguments.json:
        json.dump(_json(plan, grid=not arguments.no_grid), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    else:
        _print(plan, grid=not arguments.no_grid)
    return 0


def _count(text: str) -> int:
    return _whole(text, least=1)


def _whole(text: str, *, least: int = 0) -> int:
    # `isdecimal` alone knows the digits of every script.
    legal = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    if not legal or int(text) < least:
        msg = f"{text} is not a whole number from {least} on, of at most {_DIGITS} digits"
        raise ArgumentTypeError(msg)
    return int(text)


def _positive(text: str, *, least: float = 1 / _LARGE, most: float = _LARGE) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        msg = f"{text} is not a number from {least:g} to {most:g}"
        raise ArgumentTypeError(msg)
    return value


def _part(text: str) -> float:
    return _positive(text, most=1.0)


def _setup(arguments: argparse.Namespace) -> PipelineSetup:
    overrides = {
        name: value for name in _OVERRIDES if (value := getattr(arguments, name)) is not None
    }
    section = ModelSection(source=arguments.model, overrides=overrides)
    config = read_model_config(section)
    fields = "a model whose attention has the fields of Qwen3-MoE's"
    with reading_model(section, expected=fields):
        shape = AttentionShape(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            itemsize=_ITEMSIZE[arguments.dtype],
        )
    default = usual_stages_per_rank(arguments.schedule)
    return PipelineSetup(
        schedule=arguments.schedule,
        pp_size=arguments.pp_size,
        stages_per_rank=arguments.stages_per_rank or default,
        microbatches=arguments.microbatches,
        layers=config.num_hidden_layers,
        attention=AttentionBytes.of(
            shape, tokens=arguments.tokens, min_bytes=SwapPolicy().min_bytes
        ),
        fraction=arguments.fraction,
        other_bytes=arguments.other_bytes_per_token * arguments.tokens,
        link_bytes_per_second=arguments.link_gbps * 1e9,
        step_seconds=None if arguments.step_ms is None else arguments.step_ms / 1e3,
    )


def _json(plan: PipelinePlan, *, grid: bool) -> dict[str, Any]:
    return {
        "setup": asdict(plan.setup),
        "hiding_step_seconds": plan.hiding_step_seconds,
        "ranks": [_json_rank(rank, grid=grid) for rank in plan.ranks],
    }


def _json_rank(rank: RankPlan, *, grid: bool) -> dict[str, Any]:
    by_step = {"resident_groups_none", "resident_groups", "steps"}
    data = {
        name: getattr(rank, name)
        for name in rank.__dataclass_fields__
        if name not in by_step and name != "link"
    }
    data["link"] = None if rank.link is None else asdict(rank.link)
    if grid:
        data["resident_groups_none_by_step"] = rank.resident_groups_none
        data["resident_groups_by_step"] = rank.resident_groups
        data["steps"] = [str(step) for step in rank.steps]
    return data


def _print(plan: PipelinePlan, *, grid: bool) -> None:
    terminal = Console()
    console = Console(width=max(terminal.width, _TABLE_WIDTH))
    if grid:
        # Wider than any terminal, and meant for a pager: lines are not folded.
        console.print(
            format_grid({rank.rank: rank.steps for rank in plan.ranks}),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    console.print(_table(plan))
    setup = plan.setup
    hiding = plan.hiding_step_seconds
    console.print(
        f"one attention of one microbatch: {setup.attention.device / _GIB:.3f} GiB on the device, "
        f"{setup.attention.link / _GIB:.3f} GiB over the link",
        "nothing moves"
        if hiding is None
        else f"every copy hides when a step takes {hiding * 1e3:,.0f} ms or longer",
        sep="\n",
        highlight=False,
    )


def _table(plan: PipelinePlan) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plan.setup.schedule}, {plan.setup.pp_size} ranks, {plan.setup.microbatches} "
        "microbatches: chunks, and attention groups on the device",
    )
    for name in (
        "rank",
        "layers",
        "in flight",
        "moved",
        "moved but tail",
        "kept",
        "peak without",
        "peak with",
        "saved GiB",
        "GiB/step",
        "busy",
        "link",
        "hides",
        "stall ms",
    ):
        table.add_column(name, justify="right")
    for rank in plan.ranks:
        link = rank.link
        table.add_row(
            str(rank.rank),
            "+".join(map(str, rank.layers.values())),
            str(rank.chunks_in_flight_peak),
            str(rank.moved_chunks),
            str(rank.moved_but_tail_chunks),
            str(rank.kept_chunks),
            str(rank.resident_groups_peak_none),
            str(rank.resident_groups_peak),
            f"{rank.saved_bytes_at_peak / _GIB:.2f}",
            f"{rank.offloaded_bytes_per_step / _GIB:.2f}",
            f"{rank.busy:.0%}",
            "-" if link is None else f"{link.utilisation:.0%}",
            "-" if link is None else ("yes" if link.copies_hide else "no"),
            "-" if link is None else f"{link.stall_seconds * 1e3:,.0f}",
        )
    return table
