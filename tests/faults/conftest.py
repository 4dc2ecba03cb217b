# SPDX-License-Identifier: Apache-2.0
"""One line per family of faults, for ``make faults``."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FAMILIES = {
    "test_ordering": "ordering proofs",
    "test_pinned_pool": "pinned pool",
    "test_host_memory": "host memory limits",
    "test_host_ceilings": "host memory ceilings",
    "test_engine": "engine faults",
    "test_life": "life of a swap",
    "test_what_moves": "what moves",
    "test_state_machine": "random histories",
    "test_in_place": "in-place changes",
    "test_interrupts": "interrupts",
    "test_interrupts_pipeline": "interrupts, pipeline",
    "test_streams": "stalled streams",
    "test_cases_order": "cases: order and graphs",
    "test_cases_alias": "cases: identity, layout",
    "test_cases_memory": "cases: memory",
    "test_cases_flow": "cases: training flow",
    "test_cases_guards": "cases: refusals",
    "test_cases_model": "cases: models",
    "test_index": "cases: index",
}
"""The line of each test module."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of ``make faults``."""
    parser.addoption(
        "--families", action="store_true", help="print one line per family of faults, with counts"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print tests by family and outcome, and what the tests themselves counted."""
    if not terminalreporter.config.getoption("--families"):
        return
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            module = Path(report.nodeid.partition("::")[0]).stem
            family = FAMILIES.get(module, module.removeprefix("test_"))
            outcomes[family][outcome] += 1
            for name, number in getattr(report, "user_properties", ()):
                if isinstance(number, int):
                    counted[family][name] += number
    terminalreporter.section("families of faults")
    order = dict.fromkeys((*FAMILIES.values(), *outcomes))
    for family in (family for family in order if family in outcomes):
        tests = ", ".join(f"{number} {outcome}" for outcome, number in outcomes[family].items())
        inside = ", ".join(f"{number:,} {name}" for name, number in counted[family].items())
        terminalreporter.write_line(f"{family:<26}{tests}{f'  ({inside})' if inside else ''}")
