# SPDX-License-Identifier: Apache-2.0
"""Check the whole table: ``python -m tests.compose``; ``--publish`` also renews what docs show."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.compose.combination import Result, Verdict
from tests.compose.execution import run_all
from tests.compose.table import COMBINATIONS

_DOCS = Path(__file__).parents[2] / "docs" / "combinations.json"
_TOOLS = ("torch", "transformers", "accelerate", "peft", "trl")


def main() -> int:
    """Run every combination and write one row for each; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/compose"))
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    for ranks in sorted({combination.ranks for combination in COMBINATIONS.values()}):
        keys = [key for key, combination in COMBINATIONS.items() if combination.ranks == ranks]
        began = time.perf_counter()
        results |= run_all(keys, ranks=ranks)
        sys.stdout.write(f"{len(keys)} of {ranks} processes: {time.perf_counter() - began:.0f} s\n")
    report = json.dumps(_report(results), indent=2) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "report.json").write_text(report, "utf-8")
    if arguments.publish:
        _DOCS.write_text(report, "utf-8")
    wrong = [key for key, c in COMBINATIONS.items() if results[key].verdict is not c.expected]
    for verdict in Verdict:
        sys.stdout.write(f"{verdict}: {sum(r.verdict is verdict for r in results.values())}\n")
    for key in wrong:
        sys.stderr.write(f"{key}: {results[key].detail}\n")
    return 1 if wrong else 0


def _report(results: dict[str, Result]) -> dict[str, Any]:
    return {
        "versions": {tool: version(tool) for tool in _TOOLS},
        "combinations": [
            {
                "tool": combination.tool,
                "name": combination.name,
                "processes": combination.ranks,
                "result": results[key].verdict.value,
                "detail": results[key].detail or combination.remark,
                "figures": results[key].figures,
            }
            for key, combination in COMBINATIONS.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
