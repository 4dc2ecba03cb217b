# SPDX-License-Identifier: Apache-2.0
"""The report's verdicts, from made-up measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from activation_swap import KeepReason, SwapStats
from activation_swap.trainer.compare import _show
from activation_swap.trainer.config import parse_config
from activation_swap.trainer.link_probe import LinkRates
from activation_swap.trainer.measure import Measurement, StepTime
from activation_swap.trainer.plot import plot_report
from activation_swap.trainer.rendering import markdown, table
from activation_swap.trainer.report import NOT_FINITE, Report, build_report

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

CONFIG = parse_config({"compare": {"digest_steps": 2, "timed_steps": 4}})
LINK = LinkRates(d2h=50e9, h2d=40e9, d2h_both=45e9, h2d_both=45e9)
NONE = Measurement(
    mode="none",
    device="cpu",
    losses=(3.0, 2.5),
    gradients=({"a": "1", "b": "2"}, {"a": "3", "b": "4"}),
    step_time=StepTime.of((0.1, 0.4, 0.2)),
    resident_saved_bytes_peak=8 << 20,
    stats=SwapStats(kept_bytes={}),
)
ATTENTION = replace(
    NONE,
    mode="attention",
    resident_saved_bytes_peak=2 << 20,
    stats=SwapStats(
        offloaded_bytes=400, reloaded_bytes=200, kept_bytes={KeepReason.SMALL: 3 << 20}
    ),
)
NONE_OOM = Measurement(mode="none", out_of_memory=True)
ATTENTION_OOM = Measurement(mode="attention", out_of_memory=True)
OTHER_GRADIENT = ({"a": "1", "b": "2"}, {"a": "3", "b": "x"})


def report(
    baseline: Measurement = NONE,
    swapped: Measurement = ATTENTION,
    repeated: Measurement | None = None,
    link: LinkRates | None = None,
) -> Report:
    return build_report(CONFIG, baseline=baseline, swapped=swapped, repeated=repeated, link=link)


def test_equal_bits_pass() -> None:
    made = report()
    assert (made.losses_equal, made.gradients_equal, made.passed) == (True, True, True)
    assert made.first_difference is None
    assert made.baseline_repeats is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf")], ids=str)
def test_a_loss_that_is_no_finite_number_fails(loss: float) -> None:
    """From then on both modes hold the same bits whatever the swap does."""
    made = report(
        baseline=replace(NONE, losses=(3.0, loss)), swapped=replace(ATTENTION, losses=(3.0, loss))
    )
    assert (made.losses_equal, made.losses_finite, made.passed) == (True, False, False)
    assert NOT_FINITE in made.notes
    assert NOT_FINITE not in report().notes


def test_a_narrow_terminal_cuts_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    _show(report(), tmp_path)
    shown = capsys.readouterr().out
    assert "step time, fastest to slowest" in shown
    assert "100.0 ms to 400.0 ms" in shown


def test_changed_gradient_is_named() -> None:
    made = report(swapped=replace(ATTENTION, gradients=OTHER_GRADIENT))
    assert (made.losses_equal, made.gradients_equal, made.passed) == (True, False, False)
    assert made.first_difference == "step 2, gradient of b"


def test_missing_gradient_is_a_difference() -> None:
    made = report(swapped=replace(ATTENTION, gradients=({"a": "1"}, {"a": "3", "b": "4"})))
    assert made.first_difference == "step 1, gradient of b"
    made = report(baseline=replace(NONE, gradients=({"a": "1"}, {"a": "3", "b": "4"})))
    assert made.first_difference == "step 1, gradient of b"


def test_changed_loss_is_named() -> None:
    made = report(swapped=replace(ATTENTION, losses=(3.0, 2.0)))
    assert (made.losses_equal, made.gradients_equal, made.passed) == (False, True, False)
    assert made.first_difference == "step 2, loss"


def test_difference_counts_only_where_the_baseline_repeats() -> None:
    swapped = replace(ATTENTION, gradients=OTHER_GRADIENT)
    noisy = report(swapped=swapped, repeated=replace(NONE, gradients=OTHER_GRADIENT))
    assert (noisy.baseline_repeats, noisy.gradients_equal, noisy.passed) == (False, False, True)
    assert any("deterministic" in note for note in noisy.notes)
    exact = report(swapped=swapped, repeated=NONE)
    assert (exact.baseline_repeats, exact.passed) == (True, False)


@pytest.mark.parametrize("repeated", [None, NONE, replace(NONE, gradients=OTHER_GRADIENT)])
def test_equal_bits_tell_nothing_where_nothing_moved(repeated: Measurement | None) -> None:
    kept = SwapStats(kept_bytes={KeepReason.SMALL: 3 << 20})
    made = report(swapped=replace(ATTENTION, stats=kept), repeated=repeated)
    assert (made.losses_equal, made.gradients_equal, made.passed) == (True, True, False)
    assert "- Nothing was offloaded" in markdown(made)
    assert "Nothing was offloaded" not in markdown(report())


@pytest.mark.parametrize(
    ("baseline", "swapped", "passed"),
    [
        (NONE_OOM, ATTENTION, True),
        (NONE, ATTENTION_OOM, False),
        (NONE_OOM, ATTENTION_OOM, False),
    ],
)
def test_out_of_memory_is_a_result(
    baseline: Measurement,
    swapped: Measurement,
    passed: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    made = report(baseline=baseline, swapped=swapped, repeated=NONE_OOM)
    assert (made.losses_equal, made.gradients_equal, made.passed) == (None, None, passed)
    assert made.peak_saved_bytes is None
    assert made.step_time_ratio is None
    assert "out of memory" in markdown(made)
    plot_report(made, tmp_path / "report.png")


def test_waits_are_told_where_a_device_measured_them() -> None:
    unseen = report()
    assert unseen.modes["attention"].hiding_fraction is None
    assert "| fraction whose copies hide | - | - |" in markdown(unseen)

    seen = report(swapped=replace(ATTENTION, waited_seconds=0.0125, hiding_fraction=0.834))
    assert seen.modes["attention"].waited_seconds_per_step == 0.0125
    assert "| compute waited for copies | - | 12.5 ms |" in markdown(seen)
    assert "| fraction whose copies hide | - | 0.83 |" in markdown(seen)


def test_bytes_per_step_and_times_at_the_probed_rate() -> None:
    mode = report(link=LINK).modes["attention"]
    assert (mode.offloaded_bytes, mode.offloaded_bytes_per_step) == (400, 100)
    assert mode.d2h_seconds_per_step == pytest.approx(100 / 50e9)
    assert mode.h2d_seconds_per_step == pytest.approx(50 / 40e9)


def test_device_memory_is_the_swaps_count_on_a_cpu_and_the_allocators_elsewhere() -> None:
    on_cpu = report()
    assert on_cpu.modes["none"].peak_device_bytes == 8 << 20
    assert "swap's own count" in on_cpu.device_memory
    assert any("no accelerator" in note for note in on_cpu.notes)
    measured = replace(ATTENTION, peak_device_bytes=123)
    on_gpu = report(swapped=measured, link=LINK)
    assert on_gpu.modes["attention"].peak_device_bytes == 123
    assert not any("no accelerator" in note for note in on_gpu.notes)


def test_gain_is_told_against_the_eligible_bytes() -> None:
    made = report(swapped=replace(ATTENTION, step_time=StepTime.of((0.3,))))
    assert made.peak_saved_bytes == 6 << 20
    assert made.peak_saved_share == 0.75
    assert made.step_time_ratio == pytest.approx(1.5)
    text = markdown(made)
    assert "Eligible saved bytes: 8.00 MiB" in text
    assert "Peak device memory: lower by 6.00 MiB (75.0% of them)" in text
    assert "Step time: 1.500 of `none`" in text


def test_json_has_the_promised_keys() -> None:
    data: dict[str, Any] = json.loads(json.dumps(report().data()))
    assert data["offloaded_bytes"] == 400
    assert data["steps"] == {"digested": 2, "warmup": 2, "timed": 4}
    assert data["modes"]["attention"]["kept_bytes"] == {"small": 3 << 20}
    assert data["modes"]["none"]["step_seconds"]["median"] == 0.2
    assert data["modes"]["attention"]["resident_saved_bytes_peak"] == 2 << 20
    assert data["config"]["compare"]["timed_steps"] == 4


def test_table_and_markdown_tell_units() -> None:
    rows = {name: cells for name, *cells in table(report(link=LINK))}
    assert rows["resident saved bytes, peak"] == ["8.00 MiB", "2.00 MiB"]
    assert rows["step time, median"] == ["200.0 ms", "200.0 ms"]
    assert rows["step time, fastest to slowest"] == ["100.0 ms to 400.0 ms"] * 2
    text = markdown(report(link=LINK))
    assert "small 768.00 KiB" in text
    assert "d2h 50.0 GB/s" in text
    assert "losses equal: **yes**" in text
