# SPDX-License-Identifier: Apache-2.0
"""Write the pages that the code knows better than any author: errors, compatibility, combinations.

And the figures on pages that authors write: what stands there between ``<!-- figures: NAME -->``
and ``<!-- end of figures -->`` is made from ``benchmarks/summary.json``.

python docs/generate_pages.py           write them
python docs/generate_pages.py --check   exit with 1 when they are not current
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from activation_swap import SwapPolicy
from activation_swap.compat.facts import FACTS, MODEL_CLASS, TESTED, spelled
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DOCS = Path(__file__).parent
WITH_FIGURES = (
    DOCS.parent / "README.md",
    DOCS / "index.md",
    DOCS / "guide" / "when-not-to-use.md",
    DOCS / "guide" / "pipeline.md",
)
GIB = 2**30
PEERS = {
    "attention": "this package",
    "save_on_cpu": "`torch.autograd.graph.save_on_cpu` around each attention",
    "checkpointing": "gradient checkpointing of every decoder layer",
    "megatron": "Megatron-Core's offloading engine around each attention",
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
SERIES = {
    "AS1": "What was asked for",
    "AS2": "The model against its Transformers release",
    "AS3": "The state of the model",
    "AS4": "The trainer",
    "AS5": "Pipeline schedules",
    "AS6": "While training",
}


def errors_page() -> Iterator[str]:
    """Yield the lines of the catalogue of errors."""
    yield "# Errors"
    yield ""
    yield (
        "Every refusal of this package has a permanent code. The exception carries `reason`, "
        "`found`, `where`, `expected`, `fix` and `trace`; its message shows them line by line. "
        "All are an `ActivationSwapError`, and the built-in exception named below."
    )
    reasons = sorted(Reason, key=lambda reason: reason.value.code)
    for series, title in SERIES.items():
        yield from ("", f"## {series}xx: {title}")
        for reason in reasons:
            if reason.value.code.startswith(series):
                yield from _error(reason)


def compatibility_page(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the compatibility page.

    Args:
        record: What the version matrix wrote to ``compatibility.json``.
    """
    yield "# Compatibility"
    yield ""
    yield (
        f"Supported model: `{MODEL_CLASS}`. Tested Transformers releases: {spelled(TESTED)}. A "
        "newer release is tried with the newest facts and accepted, with one warning, only if "
        "every fact holds on the live model."
    )
    for key, title in (("transformers", "Transformers"), ("torch", "torch")):
        rows = record.get(key, [])
        yield from ("", f"## {title} releases that were run", "")
        columns = list(dict.fromkeys(name for row in rows for name in row))
        yield from _table(columns, [[str(row.get(name, "")) for name in columns] for row in rows])
    yield from ("", "## Facts by Transformers release")
    for fact in FACTS:
        yield from ("", f"### {fact.name[0].upper()}{fact.name[1:]}", "")
        rows = [
            [spelled(row.versions), f"`{row.value}`", row.changed, row.delete_when]
            for row in fact.rows
        ]
        yield from _table(["releases", "value", "what changed upstream", "delete when"], rows)


def combinations_page(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of combinations.

    Args:
        record: What ``make compose`` wrote to ``combinations.json``.
    """
    yield "# Combinations that are tested"
    yield ""
    tools = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield (
        f"Each row is a tiny real model, trained on CPU processes with {tools}. *Supported* means: "
        "losses, gradients and trained weights have the bits of the same training without swap; "
        "the bytes that moved are those that an independent count of the saved tensors finds; and "
        "no weight moved. *Refused* rows name the error."
    )
    rows = record["combinations"]
    for tool in dict.fromkeys(row["tool"] for row in rows):
        yield from ("", f"## {tool}", "")
        mine = [row for row in rows if row["tool"] == tool]
        cells = [[r["name"], str(r["processes"]), r["result"], _linked(r["detail"])] for r in mine]
        yield from _table(["combination", "processes", "result", "what to know"], cells)


def single_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the swap gains and costs on one device, over the length of the sequence."""
    single = _swapped(rows, "single")
    yield from _table(
        [
            *("tokens", "peak without", "peak with", "step without", "step with"),
            *("of the step without", "pinned host memory"),
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
        f"drift: `none` measured again took {drift} of its first time."
        f"{_notes(_swapped(rows, *SET_UPS))}"
    )


def elsewhere_block(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the swap gains and costs in other trainings, one row for each kind."""
    yield from _table(
        ["set-up", "tokens", "off the peak", "of the step without", "`none` again"],
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
    yield from _table(
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
    yield from _table(["tool", "off the peak", "of the step without"], cells)
    if notes := _notes([found["attention"]], one="this package's row was").strip():
        yield ""
        yield notes


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
    "*`none` again* is the same training without the swap a second time, by the first time: so far "
    "did those machines drift by themselves."
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


def pages() -> dict[Path, str]:
    """Return the text of every generated page, and of those with figures, by its path."""
    rows = _record("benchmarks/summary")
    figures = {path: with_figures(path.read_text(encoding="utf-8"), rows) for path in WITH_FIGURES}
    return figures | {
        DOCS / "errors.md": "\n".join(errors_page()) + "\n",
        DOCS / "compatibility.md": "\n".join(compatibility_page(_record("compatibility"))) + "\n",
        DOCS / "combinations.md": "\n".join(combinations_page(_record("combinations"))) + "\n",
    }


def _record(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))


def _linked(detail: str) -> str:
    """Make a link of the code of an error at the beginning of a detail."""
    code = re.match(r"AS\d{3}", detail)
    return detail if code is None else f"[{code[0]}](errors.md#{code[0].lower()}){detail[5:]}"


def main(arguments: list[str]) -> int:
    """Write or check the pages and return the exit status."""
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            sys.stderr.write(f"{path} is not current: run python docs/generate_pages.py\n")
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


def _error(reason: Reason) -> Iterator[str]:
    spec = reason.value
    builtin = next(base for base in spec.kind.__mro__ if base.__module__ == "builtins")
    yield from ("", f"({spec.code.lower()})=", "", f"### {spec.code}: {spec.summary}", "")
    yield f"`{spec.kind.__name__}`, a `{builtin.__name__}`. {_sentence(spec.consequence)}"
    yield from ("", f"- Expected: {spec.expected}.", f"- Fix: {spec.fix}.")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


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
    """Return the step times of ``none`` measured again, by the first ones of the same work."""
    seen: set[tuple[Any, ...]] = set()
    again = []
    for row in rows:
        if row["mode"] == "none" and row["name"] in names:
            if _work(row) in seen:
                again.append(row["step_time_ratio"])
            seen.add(_work(row))
    return again


def _notes(rows: list[dict[str, Any]], *, one: str = "it was") -> str:
    """Return what a reader must know of how rows were measured, each part of a note once."""
    parts = (part for row in rows if "note" in row for part in row["note"].split(", and "))
    notes = [
        f"{_how_many(count, len(rows)) if rows[1:] else one} {part.rstrip('.')}"
        for part, count in Counter(parts).items()
    ]
    return f" Note: {'; '.join(notes)}." if notes else ""


def _how_many(count: int, rows: int) -> str:
    return f"all {rows}" if count == rows else f"{count} of these {rows}"


def _step_without(row: dict[str, Any]) -> float | None:
    ratio = row["step_time_ratio"]
    return None if ratio is None else float(row["step_ms"] / ratio)


def _table(columns: list[str], rows: list[list[str]], *, align: str = "---") -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{f' {align} |' * len(columns)}"
    for row in rows:
        cells = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
