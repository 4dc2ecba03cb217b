# SPDX-License-Identifier: Apache-2.0
"""Figures on pages that authors write, made from the rows of ``benchmarks/summary.json``."""

from __future__ import annotations

import re
from textwrap import fill
from typing import TYPE_CHECKING, Any

from activation_swap import SwapPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["BLOCKS", "table", "with_figures"]

GIB = 2**30
PEERS = {
    "attention": "this package",
    "save_on_cpu": "`torch.autograd.graph.save_on_cpu` around each attention",
    "checkpointing": "gradient checkpointing of every decoder layer",
    "megatron": "Megatron-Core's offloading engine around each attention",
    "torchtune": "torchtune's `OffloadActivations` around each attention",
    "trl": "TRL's `OffloadActivations`, whole model",
}
SET_UPS = {
    "fsdp2": "FSDP2 with AdamW on one GPU",
    "fsdp2-2": "FSDP2 with AdamW over two GPUs",
    "fsdp2-4": "FSDP2 with AdamW over four GPUs",
    "lora": "LoRA on one GPU",
    "pipeline-stage": "one stage of a pipeline on one GPU",
    "pipeline-2": "pipelines over two GPUs",
    "pipeline-4": "pipelines over four GPUs",
    "pipeline-fsdp2-4": "a pipeline of two ranks, each sharded over two GPUs",
}


def single_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the swap gains and costs on one device, over the length of the sequence."""
    single = _swapped(rows, "single")
    yield from table(
        [
            *("tokens", "peak without", "peak with", "step without", "step with"),
            *("step time ratio", "pinned host memory"),
        ],
        [
            [
                f"{row['tokens']:,}",
                _gib(row["peak_bytes_none"]) or row["outcome_none"],
                _gib(row["peak_bytes"]),
                _milliseconds(_step_without(row)),
                _milliseconds(row["step_ms"]),
                _ratio(row["step_time_ratio"]),
                _gib(row["host_bytes_reserved"]),
            ]
            for row in single
        ],
        align="---:",
    )
    first = single[0]
    yield ""
    yield (
        f"One NVIDIA H200, {first['layers']} layers of the 30-billion shape of Qwen3-MoE, bf16, "
        f"SDPA, batch 1, torch {first['torch']}, Transformers {first['transformers']}, "
        f"{first['date'][:10]}.{_notes(single)}"
    )


def hooks_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the milliseconds that each layer adds to a step, and how runs of one kind differ."""
    added = [
        f"{(row['step_ms'] - without) / row['layers']:.2f} ms at {row['tokens']:,} tokens"
        for row in _swapped(rows, "single")
        if (without := _step_without(row)) is not None
    ]
    alike = [
        row
        for row in _swapped(rows, "single", "peers", "threshold")
        if row["tokens"] == 4096 and SwapPolicy(**row["policy"]) == SwapPolicy()  # noqa: PLR2004
    ]
    yield (
        f"The swap adds to the step, for each layer: {_listed(added)}. The {len(alike)} recorded "
        "runs of 4,096 tokens with the default policy took "
        f"{_range(row['step_time_ratio'] for row in alike)} of the step without.{_notes(alike)}"
    )


def set_ups_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield in a sentence what the swap costs in trainings other than that of the table."""
    costs = [
        f"{_range(row['step_time_ratio'] for row in own)} ({title})"
        for name, title in SET_UPS.items()
        if (own := _swapped(rows, name))
    ]
    drift = _range(_drift(rows, *SET_UPS))
    yield (
        f"In other set-ups the step took, of the step without: {_listed(costs)}. Those machines "
        f"drift: where `none` was measured again, the slower time was {drift} of the faster one, "
        "and ratios are to that."
        f"{_notes(_swapped(rows, *SET_UPS))}"
    )


def elsewhere_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the swap gains and costs in other trainings, one row for each kind."""
    yield from table(
        ["set-up", "tokens", "off the peak", "step time ratio", "`none` again"],
        [
            [
                f"[{title}](../benchmarks/{name}.md)",
                _range((row["tokens"] for row in own), ","),
                f"{_range((_freed(row) / GIB for row in own), '.2f')} GiB",
                _range(row["step_time_ratio"] for row in own),
                _range(_drift(rows, name)),
            ]
            for name, title in SET_UPS.items()
            if (own := _swapped(rows, name))
        ],
    )
    yield ""
    yield f"{_AGAIN}{_notes(_swapped(rows, *SET_UPS))}"


def pipelines_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the swap gains and costs in each pipeline."""
    pipelines = [row for row in _swapped(rows, *SET_UPS) if "schedule" in row]
    yield from table(
        [
            *("schedule", "GPUs", "stages a rank", "microbatches"),
            *("off the peak", "of the prediction", "of the step without", "`none` again"),
        ],
        [
            [
                row["schedule"],
                str(row["gpus"]),
                str(row["stages_per_rank"]),
                f"{row['microbatches']} x {row['tokens']:,} tokens",
                f"{_freed(row) / GIB:.2f} GiB",
                f"{row['freed_of_predicted']:.1%}",
                _ratio(row["step_time_ratio"]),
                _range(_drift([none for none in rows if _work(none) == _work(row)], row["name"])),
            ]
            for row in pipelines
        ],
    )
    yield ""
    yield f"{_AGAIN}{_notes(pipelines)}"


def peers_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what a user could take instead, in the same step."""
    found = {row["mode"]: row for row in rows if row["name"] == "peers"}
    cells = [
        [
            title,
            _gib(found[mode]["peak_bytes_none"] - found[mode]["peak_bytes"]),
            _ratio(found[mode]["step_time_ratio"]),
        ]
        for mode, title in PEERS.items()
    ]
    yield from table(["tool", "off the peak", "step time ratio"], cells)
    if hint := _notes([found["attention"]]).strip():
        yield ""
        yield hint


def bits_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield in how many measurements the bits were those of the training without swap."""
    # Not both: a stage alone, which has no loss; a run without copies, whose gradients are garbage.
    compared = [row for row in rows if None not in (row["losses_equal"], row["gradients_equal"])]
    others = [row for row in compared if row["mode"] != "none"]
    equal = [row for row in others if row["losses_equal"] and row["gradients_equal"]]
    two = sum(row["gpus"] > 1 for row in equal)
    own = [row for row in equal if row["mode"] == "attention"]
    peers = len(equal) - len(own)
    yield (
        f"In {len(equal)} of {len(others)} measurements beside `none`, every loss, and every "
        "gradient of a step under deterministic algorithms, had its bits: "
        f"{len(own)} of this package, {two} of these on two GPUs over NCCL, and {peers} of other "
        f"tools.{_notes(own)}"
    )


BLOCKS = {
    "single": single_block,
    "hooks": hooks_block,
    "set_ups": set_ups_block,
    "elsewhere": elsewhere_block,
    "pipelines": pipelines_block,
    "peers": peers_block,
    "bits": bits_block,
}
_AGAIN = (
    "*`none` again* is the slower of two measurements without the swap, by the faster one: so far "
    "did those machines drift by themselves. Ratios are to the faster one."
)


def with_figures(text: str, rows: list[dict[str, Any]]) -> str:
    """Return a page with its figures made anew.

    Args:
        text: The page.
        rows: Of ``benchmarks/summary.json``.
    """

    def block(found: re.Match[str]) -> str:
        lines = (
            line if line[:1] == "|" else fill(line, 118, break_on_hyphens=False)
            for line in BLOCKS[found[2]](rows)
        )
        return "\n".join([found[1], "", *lines, "", found[3]])

    pattern = r"(<!-- figures: (\w+)[^>]*-->)\n.*?(<!-- end of figures -->)"
    return re.sub(pattern, block, text, flags=re.DOTALL)


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f} GiB"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _range(values: Iterable[float], form: str = ".3f") -> str:
    """Return the least and the greatest of what was measured, as far as they differ."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in known[:1] + known[-1:]))


def _listed(words: list[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def _swapped(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the rows of this package in runs of these names."""
    return [row for row in rows if row["mode"] == "attention" and row["name"] in names]


def _freed(row: dict[str, Any]) -> float:
    return float(row["peak_bytes_none"] - row["peak_bytes"])


def _work(row: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("name", "schedule", "stages_per_rank", "tokens", "layers", "microbatches")
    return tuple(row.get(key) for key in keys)


def _drift(rows: list[dict[str, Any]], *names: str) -> list[float]:
    """Return the slower step times of ``none``, where it was measured again, by the faster ones."""
    ratios: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["mode"] == "none" and row["name"] in names:
            ratios.setdefault(_work(row), []).append(row["step_time_ratio"])
    return [max(found) for found in ratios.values() if len(found) > 1]


def _notes(rows: list[dict[str, Any]]) -> str:
    """Return a hint where rows have notes: what these say is on the pages of the runs."""
    if not any("note" in row for row in rows):
        return ""
    return " Some of it was measured under conditions that the benchmarks' pages name."


def _step_without(row: dict[str, Any]) -> float | None:
    ratio = row["step_time_ratio"]
    return None if ratio is None else float(row["step_ms"] / ratio)


def table(columns: list[str], rows: list[list[str]], *, align: str = "---") -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{f' {align} |' * len(columns)}"
    for row in rows:
        cells = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
