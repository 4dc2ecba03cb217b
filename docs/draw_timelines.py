# SPDX-License-Identifier: Apache-2.0
"""Draw the two timelines of the documentation: the layer chain, and 1F1B.

python docs/draw_timelines.py

The order of the copies in 1F1B is what the planner says; durations are made up, in units of the
forward of one layer or stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from activation_swap.core.schedule.actions import Kind
from activation_swap.core.schedule.liveness import find_chunks
from activation_swap.core.schedule.lowering import plan_rank
from activation_swap.core.schedule.torch_orders import compute_orders
from activation_swap.trainer.pipeline_time import simulate_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path(__file__).parent / "_static"
LAYERS = 4
ATTENTION, REST, COPY = 0.4, 0.6, 0.7
RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD, D2H, H2D, OTHER = "#4c72b0", "#55a868", "#dd8452", "#c44e52", "#cccccc"


def main() -> None:
    """Write both pictures."""
    # Equal input gives equal files, so that a change of a picture is a change of what it shows.
    mpl.rcParams["svg.hashsalt"] = "activation_swap"
    mpl.rcParams["svg.fonttype"] = "none"
    _save(layer_chain(), "layer-chain.svg")
    _save(one_f_one_b(), "one-f-one-b.svg")


def layer_chain() -> Figure:
    """Forward and backward of four layers: streams above, device memory of each group below."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    streams, memory = figure.subplots(2, 1, sharex=True)
    begin = [float(layer) for layer in range(LAYERS)]
    for layer, at in enumerate(begin):
        _box(streams, 2, at, ATTENTION, FORWARD, f"F{layer}")
        _box(streams, 2, at + ATTENTION, REST, OTHER, "")
    back = {}
    now = float(LAYERS)
    for layer in reversed(range(LAYERS)):
        _box(streams, 2, now, 2 * REST, OTHER, "")
        back[layer] = now + 2 * REST
        _box(streams, 2, back[layer], 2 * ATTENTION, BACKWARD, f"B{layer}")
        now = back[layer] + 2 * ATTENTION
    last = LAYERS - 1
    for layer in range(last):
        out, into = begin[layer] + ATTENTION, back[layer + 1]
        _box(streams, 1, out, COPY, D2H, f"out {layer}")
        _box(streams, 0, into, COPY, H2D, f"in {layer}")
        _box(memory, layer, begin[layer], 1 + ATTENTION, D2H, "on the device")
        _box(memory, layer, into, back[layer] + 2 * ATTENTION - into, H2D, "on the device")
    _box(
        memory,
        last,
        begin[last],
        now - begin[last] - (now - back[last] - 2 * ATTENTION),
        OTHER,
        "stays: its backward comes first",
    )
    streams.set_yticks(range(3), ["H2D stream", "D2H stream", "compute stream"])
    memory.set_yticks(range(LAYERS), [f"group {layer}" for layer in range(LAYERS)])
    memory.set_xlabel("time; grey on the compute stream: everything but attention")
    for axes in (streams, memory):
        _plain(axes)
    return figure


def one_f_one_b() -> Figure:
    """Each rank's compute with the copies that the plan puts beside it."""
    orders = compute_orders("1F1B", pp_size=RANKS, microbatches=MICROBATCHES, stages_per_rank=1)
    times = simulate_time(orders, lambda action: 1.0 if action.kind is Kind.FORWARD else 2.0)
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for rank, order in orders.items():
        row = 3 * (RANKS - 1 - rank)
        plan = plan_rank(order, attentions={rank: 12})
        for lowered, interval in zip(plan, times[rank], strict=True):
            action = lowered.step.members[0]
            forward = action.kind is Kind.FORWARD
            width = interval.end - interval.begin
            color = FORWARD if forward else BACKWARD
            _box(axes, row + 1, interval.begin, width, color, str(action.microbatch))
        kinds = {(a.kind, a.microbatch) for step in plan for a in (*step.before, *step.after)}
        for chunk in find_chunks(order):
            number = chunk.key.microbatch
            there, back = times[rank][chunk.forward], times[rank][chunk.first_use]
            if (Kind.OFFLOAD, number) in kinds:
                _box(axes, row + 0.35, there.begin + 0.2, 0.8, D2H, str(number), height=0.4)
            if (Kind.RELOAD, number) in kinds:
                # The verb brings the last attention back; the others follow under the backward.
                launched = times[rank][chunk.first_use - 1].begin
                _box(axes, row - 0.1, launched, 0.3, H2D, "", height=0.4)
            if (Kind.OFFLOAD, number) in kinds:
                _box(axes, row - 0.1, back.begin, 1.8, H2D, str(number), height=0.4)
    axes.set_yticks(
        [3 * (RANKS - 1 - rank) + 0.6 for rank in range(RANKS)],
        [f"rank {rank}" for rank in range(RANKS)],
    )
    axes.set_xlabel("time, in forwards of a stage; numbers are microbatches")
    names = {"forward": FORWARD, "backward": BACKWARD, "to the host": D2H, "back": H2D}
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in names.items()],
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    _plain(axes)
    return figure


def _box(  # noqa: PLR0917 - a table of boxes reads best by position
    axes: Axes,
    row: float,
    begin: float,
    width: float,
    color: str,
    text: str,
    *,
    height: float = 0.8,
) -> None:
    axes.barh(row, width, left=begin, height=height, color=color, edgecolor="white")
    axes.text(begin + width / 2, row, text, ha="center", va="center", fontsize=8)


def _plain(axes: Axes) -> None:
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _save(figure: Figure, name: str) -> None:
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / name, metadata={"Date": None})


if __name__ == "__main__":
    main()
