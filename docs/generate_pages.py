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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import table, with_figures

from activation_swap.compat.facts import FACTS, MODEL_CLASS, TESTED, spelled
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent
WITH_FIGURES = (
    DOCS.parent / "README.md",
    DOCS / "index.md",
    DOCS / "guide" / "when-not-to-use.md",
    DOCS / "guide" / "pipeline.md",
)
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
        yield from table(columns, [[str(row.get(name, "")) for name in columns] for row in rows])
    yield from ("", "## Facts by Transformers release")
    for fact in FACTS:
        yield from ("", f"### {fact.name[0].upper()}{fact.name[1:]}", "")
        rows = [
            [spelled(row.versions), f"`{row.value}`", row.changed, row.delete_when]
            for row in fact.rows
        ]
        yield from table(["releases", "value", "what changed upstream", "delete when"], rows)


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
        yield from table(["combination", "processes", "result", "what to know"], cells)


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
    yield (
        f"`Reason.{reason.name}`, raised as `{spec.kind.__name__}`, a `{builtin.__name__}`. "
        f"{_sentence(spec.consequence)}"
    )
    yield from ("", f"- Expected: {spec.expected}.", f"- Fix: {spec.fix}.")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
