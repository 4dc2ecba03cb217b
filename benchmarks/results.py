# SPDX-License-Identifier: Apache-2.0
"""Results as they were written, and what follows from several of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Comparison", "Result", "compare", "load", "read", "summary"]


_ADAMW = "AdamW inside backward, gradients freed at once, lr 0"


@dataclass(frozen=True)
class Result:
    """One measurement: the content of one JSON file."""

    record: dict[str, Any]

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.record["run"])

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return str(self.record["mode"])

    @property
    def tokens(self) -> int:
        """Tokens in a microbatch."""
        return int(self.record["point"]["tokens"])

    @property
    def layers(self) -> int:
        """Decoder layers; 0 where no model was built."""
        return int(self.record["point"]["layers"] or 0)

    @property
    def microbatches(self) -> int:
        """Forwards in a step."""
        return int(self.record["point"]["microbatches"])

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule; empty without a pipeline."""
        return str(self.record["point"].get("schedule", ""))

    @property
    def stages_per_rank(self) -> int:
        """Stages of the pipeline on each rank; 0 without a pipeline."""
        return int(self.record["point"].get("stages_per_rank", 0))

    @property
    def policy(self) -> dict[str, Any]:
        """Fields of ``SwapPolicy`` that were not the default."""
        return dict(self.record["point"]["policy"])

    @property
    def note(self) -> str:
        """What a reader must know of how it was measured; empty where nothing was special."""
        return str(self.record.get("note", ""))

    @property
    def measured(self) -> bool:
        """Whether it ran to its end."""
        return bool(self.record["outcome"] == "measured")

    @property
    def reached(self) -> bool:
        """Whether it says anything of the machine: figures, or that the memory is not enough."""
        return self.record["outcome"] not in {"failed", "not run"}

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured; empty when nothing was."""
        return dict(self.record.get("figures", {}))

    @property
    def work(self) -> str:
        """What was trained, for a reader."""
        schedule = f"{self.schedule}, {self.stages_per_rank} stages a rank, "
        microbatches = f"{self.microbatches} x " if self.microbatches > 1 else ""
        policy = "".join(f", {key} {value:,}" for key, value in self.policy.items())
        return f"{schedule if self.schedule else ''}{microbatches}{self.tokens:,} tokens{policy}"

    def same_work(self, other: Result) -> bool:
        """Whether both did the same training."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in (
                *("run", "tokens", "layers", "microbatches"),
                *("schedule", "stages_per_rank"),
            )
        )

    def step_ms(self) -> float:
        """Return the median step time of what was measured."""
        return float(self.figures["step_ms"])

    def same_measurement(self, other: Result) -> bool:
        """Whether one is the other made again: the same work, mode, policy and repetition."""
        of_both = [
            (
                *(one.run, one.mode, one.tokens, one.microbatches),
                *(one.schedule, one.stages_per_rank, one.policy, one.record.get("repeat", 0)),
            )
            for one in (self, other)
        ]
        # What failed before its model was built does not know the number of its layers.
        layers = {self.layers, other.layers} - {0}
        return of_both[0] == of_both[1] and len(layers) <= 1


@dataclass(frozen=True)
class Comparison:
    """A result beside ``none`` and ``attention`` of the same work, where those were measured.

    Attributes:
        result: The measurement.
        base: ``none``.
        swapped: ``attention``.
        outcome_of_none: How ``none`` ended, which may be out of memory.
    """

    result: Result
    base: Result | None = None
    swapped: Result | None = None
    outcome_of_none: str | None = None

    @property
    def eligible_bytes(self) -> int | None:
        """Bytes of all attentions but the last that could move, as ``attention`` counts them."""
        for known in (self.result, self.swapped):
            nbytes = None if known is None else known.figures.get("eligible_bytes")
            if nbytes is not None:
                return int(nbytes)
        return None

    @property
    def step_time_ratio(self) -> float | None:
        """Median step time by that of ``none``."""
        return self._ratio("step_ms")

    @property
    def back_to_back_ratio(self) -> float | None:
        """Time of a step that follows the last one at once, by that of ``none``."""
        return self._ratio("back_to_back_ms")

    @property
    def freed_bytes(self) -> int | None:
        """Device bytes off the peak."""
        before, after = self._pair("peak_bytes")
        return None if before is None or after is None else int(before - after)

    @property
    def freed_fraction(self) -> float | None:
        """Bytes off the peak by the eligible ones."""
        freed, eligible = self.freed_bytes, self.eligible_bytes
        return None if freed is None or not eligible else freed / eligible

    @property
    def ms_per_gb(self) -> float | None:
        """Milliseconds of step time for each GB (10^9 bytes) off the peak."""
        before, after = self._pair("step_ms")
        if before is None or after is None or not self.freed_bytes or self.freed_bytes < 0:
            return None
        return float(after - before) / self.freed_bytes * 1e9

    @property
    def losses_equal(self) -> bool | None:
        """Whether every step had the loss of ``none``, bit for bit."""
        return self._equal("losses")

    @property
    def gradients_equal(self) -> bool | None:
        """Whether every gradient of the digested step was that of ``none``, bit for bit."""
        return self._equal("gradient_digest")

    @property
    def predicted_bytes(self) -> int | None:
        """What the plan takes off the peak of the rank that is the fullest without a swap."""
        planned = self._of_fullest("planned")[1]
        if planned is None:
            return self.result.figures.get("predicted_bytes")
        return int(planned["saved_bytes_at_peak"])

    @property
    def freed_of_predicted(self) -> float | None:
        """What that rank's peak fell by, by the prediction."""
        before, after = self._of_fullest("peak_bytes")
        if before is None or after is None:
            before, after = self._pair("peak_bytes")
        if before is None or after is None or not self.predicted_bytes:
            return None
        return float((before - after) / self.predicted_bytes)

    def _of_fullest(self, figure: str) -> tuple[Any, Any]:
        """Return a figure of the rank with the highest peak without a swap, before and after."""
        before, after = self._pair("ranks")
        if before is None or after is None or self.result.mode == "none":
            return None, None
        peaks = [rank["peak_bytes"] or 0 for rank in before]
        fullest = peaks.index(max(peaks))
        return before[fullest].get(figure), after[fullest].get(figure)

    def _equal(self, figure: str) -> bool | None:
        before, after = self._pair(figure)
        return None if before is None or after is None else bool(before == after)

    def _ratio(self, figure: str) -> float | None:
        before, after = self._pair(figure)
        return None if before is None or after is None else float(after / before)

    def _pair(self, figure: str) -> tuple[Any, Any]:
        base = {} if self.base is None else self.base.figures
        return base.get(figure), self.result.figures.get(figure)


def load(folders: Iterable[Path]) -> list[Result]:
    """Return the results in ``folders`` by size of the work, then in the order of their runs."""
    results = [
        result
        for folder in folders
        for path in sorted(folder.glob("*.json"))
        for result in read(path)
    ]
    return sorted(results, key=lambda result: (result.tokens, result.layers, result.microbatches))


def read(path: Path) -> list[Result]:
    """Return the results in one file: a measurement, or a script's report of several."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return _of_report(path.stem, content) if "rows" in content else [Result(content)]


def _of_report(name: str, report: dict[str, Any]) -> list[Result]:
    """Return the rows of a report of :func:`benchmarks.pair.compare` or of a script like it."""
    given = re.findall(r"--(\w+)=(\S+)", report["command"])
    options = dict(given)
    point = {
        "tokens": int(options["tokens"]),
        "layers": int(options["layers"]),
        "microbatches": int(options.get("microbatches", 1)),
        "policy": {},
    }
    return [
        Result(
            {
                "run": report.get("run", name),
                "mode": row["mode"],
                "repeat": position,
                "shape": options.get("shape", report.get("shape")),
                "point": point,
                "gpus": row.get("ranks", 1),
                "warmup": int(options["warmup"]),
                "steps": int(options["steps"]),
                "optimizer": report.get("optimizer", _ADAMW),
                "outcome": "measured",
                # In a record, `ranks` are the figures of each; here it is their number.
                "figures": {
                    **{name: value for name, value in row.items() if name != "ranks"},
                    "eligible_bytes": row.get("saved_bytes") or None,
                },
                "note": report.get("note", ""),
                "machine": row["machine"],
                "command": report["command"],
                "date": row["machine"]["date"],
            }
        )
        for position, row in enumerate(report["rows"])
    ]


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Put each result beside the fastest ``none`` and ``attention`` of the same work.

    The machines drift. What is said of a step time never gains by a slow ``none``.
    """

    def find(mode: str, result: Result) -> Result | None:
        known = [other for other in results if other.mode == mode and other.same_work(result)]
        measured = [other for other in known if other.measured]
        return min(measured, key=Result.step_ms, default=next(iter(known), None))

    comparisons = []
    for result in results:
        base, swapped = find("none", result), find("attention", result)
        comparisons.append(
            Comparison(
                result,
                base if base is not None and base.measured else None,
                swapped if swapped is not None and swapped.measured else None,
                None if base is None else str(base.record["outcome"]),
            )
        )
    return comparisons


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the rows of ``summary.json``: one for each measurement that ran."""
    rows = []
    for comparison in compare(results):
        result = comparison.result
        if not result.measured:
            continue
        base = {} if comparison.base is None else comparison.base.figures
        machine = result.record["machine"]
        rows.append(
            {
                "name": result.run,
                "mode": result.mode,
                "tokens": result.tokens,
                "gpus": result.record["gpus"],
                "step_time_ratio": comparison.step_time_ratio,
                "outcome_none": comparison.outcome_of_none,
                "peak_bytes_none": base.get("peak_bytes"),
                "peak_bytes": result.figures["peak_bytes"],
                "eligible_bytes": comparison.eligible_bytes,
                "freed_fraction": comparison.freed_fraction,
                "date": result.record["date"],
                "torch": machine["torch"],
                "transformers": machine["transformers"],
                "layers": result.layers,
                "microbatches": result.microbatches,
                "policy": result.policy,
                "step_ms": result.figures["step_ms"],
                "host_bytes_reserved": result.figures.get("host_bytes_reserved"),
                "losses_equal": comparison.losses_equal,
                "gradients_equal": comparison.gradients_equal,
                **({"note": result.note} if result.note else {}),
                **_of_pipeline(comparison),
            }
        )
    return rows


def _of_pipeline(comparison: Comparison) -> dict[str, Any]:
    """Return what a summary's row says of a pipeline besides; nothing where there is none."""
    result = comparison.result
    of_schedule = {"schedule": result.schedule, "stages_per_rank": result.stages_per_rank}
    of_plan = {
        "predicted_bytes": comparison.predicted_bytes,
        "freed_of_predicted": comparison.freed_of_predicted,
    }
    if result.schedule:
        return of_schedule | of_plan
    return {} if comparison.predicted_bytes is None else of_plan
