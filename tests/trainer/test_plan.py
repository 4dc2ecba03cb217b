# SPDX-License-Identifier: Apache-2.0
"""The ``plan`` command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from activation_swap.core.schedule.actions import parse_plan
from activation_swap.core.schedule.validation import validate
from activation_swap.trainer.__main__ import main
from activation_swap.trainer.attention_bytes import AttentionBytes, AttentionShape
from activation_swap.trainer.pipeline_plan import PipelineSetup, plan_pipeline
from activation_swap.trainer.stage_split import split_layers
from tests.schedule.fake_world import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

QWEN3_30B_A3B = AttentionShape(hidden=2048, heads=32, kv_heads=4, head_dim=128, itemsize=2)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_bytes_of_one_attention() -> None:
    """The table in the design: 50,176 bytes per token, the upcasts narrow on the link."""
    # One number for each head of q, of k and of the softmax.
    small = 4 * (32 + 4 + 32)
    one = AttentionBytes.of(QWEN3_30B_A3B, tokens=1, min_bytes=0)
    assert one == AttentionBytes(device=50_176 + small, link=50_176 + small - 8_192 - 1_024)
    many = AttentionBytes.of(QWEN3_30B_A3B, tokens=4096, min_bytes=0)
    assert many == AttentionBytes(device=4096 * one.device, link=4096 * one.link)
    # As measured on an H200 with the default policy: the upcast of k, 8 MiB, does not narrow.
    default = AttentionBytes.of(QWEN3_30B_A3B, tokens=4096, min_bytes=2**20)
    assert default == AttentionBytes(device=4096 * 50_176, link=4096 * (50_176 - 8_192))
    # From 8,192 on, 32 heads' numbers have 1 MiB.
    long = AttentionBytes.of(QWEN3_30B_A3B, tokens=8192, min_bytes=2**20)
    assert long.device == 8192 * (50_176 + 2 * 4 * 32)
    without_small = AttentionBytes.of(QWEN3_30B_A3B, tokens=512, min_bytes=2**20)
    assert without_small.device == 512 * (50_176 - 3 * 1_024)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (2, 3, [1, 1, 0])],
)
def test_split(layers: int, stages: int, expected: list[int]) -> None:
    split = split_layers(layers, stages)
    assert [len(part) for part in split] == expected
    assert [number for part in split for number in part] == list(range(layers))


def test_plan_of_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, "--schedule", "1F1B", "--pp-size", "8", "--microbatches", "32")
    ranks = result["ranks"]
    attention = result["setup"]["attention"]
    assert [rank["rank"] for rank in ranks] == list(range(8))
    assert [rank["resident_groups_peak_none"] for rank in ranks] == [6 * n for n in range(8, 0, -1)]
    assert ranks[0]["resident_groups_peak"] == 4
    assert ranks[7]["resident_groups_peak"] == 2
    for rank in ranks:
        validate(parse_plan(" ".join(rank["steps"])))
        assert rank["link"] is None
        assert rank["busy"] == pytest.approx(32 / (32 + 7))
        fallen = rank["resident_groups_peak_none"] - rank["resident_groups_peak"]
        assert rank["saved_bytes_at_peak"] == fallen * attention["device"]
        assert max(rank["resident_groups_by_step"]) == rank["resident_groups_peak"]
        groups = 6 * rank["moved_chunks"] + 5 * rank["moved_but_tail_chunks"]
        assert rank["offloaded_bytes_per_step"] == groups * attention["link"]


def test_whether_the_copies_hide(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--pp-size", "4", "--microbatches", "8", "--no-grid")
    enough = plan(capsys, *shape)["hiding_step_seconds"] * 1e3
    slow = plan(capsys, *shape, "--step-ms", str(enough * 1.01))
    fast = plan(capsys, *shape, "--step-ms", str(enough * 0.5))
    for rank_slow, rank_fast in zip(slow["ranks"], fast["ranks"], strict=True):
        assert rank_slow["link"]["copies_hide"]
        assert rank_slow["link"]["stall_seconds"] == 0
        assert not rank_fast["link"]["copies_hide"]
        assert rank_fast["link"]["stall_seconds"] > 0
        assert rank_fast["link"]["utilisation"] > rank_slow["link"]["utilisation"]
        assert "steps" not in rank_slow


def test_a_fraction_moves_less_and_hides_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank has 12 layers; 3 of them move, every fourth."""
    shape = ("--pp-size", "4", "--microbatches", "8")
    whole = plan(capsys, *shape)
    part = plan(capsys, *shape, "--fraction", "0.25", "--step-ms", "4000")
    assert part["setup"]["fraction"] == 0.25
    assert part["hiding_step_seconds"] == pytest.approx(whole["hiding_step_seconds"] / 4)
    for all_of_them, rank in zip(whole["ranks"], part["ranks"], strict=True):
        validate(parse_plan(" ".join(rank["steps"])))
        assert rank["resident_groups_peak_none"] == all_of_them["resident_groups_peak_none"]
        assert rank["saved_bytes_at_peak"] < all_of_them["saved_bytes_at_peak"]
        staying = [9 * n // 12 for n in rank["resident_groups_none_by_step"]]
        assert all(a >= b for a, b in zip(rank["resident_groups_by_step"], staying, strict=True))
        moved = 3 * rank["moved_chunks"] + 2 * rank["moved_but_tail_chunks"]
        assert rank["offloaded_bytes_per_step"] == moved * part["setup"]["attention"]["link"]
        assert rank["link"]["copies_hide"]
    assert part["ranks"][0]["saved_bytes_at_peak"] > 0


def test_a_model_of_another_shape_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2"}')
    assert main(["plan", "--pp-size", "4", "--microbatches", "8", "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("AS404")
    assert "'num_key_value_heads'" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--other-bytes-per-token", "-1"),
        ("--other-bytes-per-token", "1e6"),
        ("--tokens", "0"),
        ("--tokens", "1.5"),
        ("--link-gbps", "0"),
        ("--step-ms", "-1"),
        ("--step-ms", "long"),
        ("--fraction", "0"),
        ("--fraction", "1.1"),
        ("--fraction", "nan"),
        ("--tokens", "1" + "0" * 400),
        ("--tokens", "1" + "0" * 5000),
        ("--num-hidden-layers", "\N{ARABIC-INDIC DIGIT THREE}"),
        ("--link-gbps", "1e-320"),
        ("--link-gbps", "1e300"),
        ("--step-ms", "1e-323"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--pp-size", "4", "--microbatches", "8", option, value])
    assert f"{option}: {value} is not" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["1", "9" * 12])
@pytest.mark.parametrize("rate", ["1e-9", "1e9"])
@pytest.mark.parametrize("step", ["1e-9", "1e9"])
def test_the_largest_and_smallest_values_are_planned(
    tokens: str, rate: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--pp-size", "4", "--microbatches", "8", "--other-bytes-per-token", "9" * 12)
    assert main(["plan", *shape, "--tokens", tokens, "--link-gbps", rate, "--step-ms", step]) == 0
    assert "inf" not in capsys.readouterr().out
    plan(capsys, *shape, "--tokens", tokens, "--link-gbps", rate, "--step-ms", step)


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "--pp-size",
            "1",
            "--microbatches",
            "1",
            "--schedule",
            "GPipe",
            "--num-hidden-layers",
            "1",
        ),
        ("--pp-size", "4", "--microbatches", "8", "--tokens", "1"),  # all storages are too small
    ],
    ids=["one attention", "one token"],
)
def test_where_nothing_moves_it_is_said(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out.endswith("\nnothing moves\n")
    result = plan(capsys, *arguments)
    assert result["hiding_step_seconds"] is None
    for rank in result["ranks"]:
        assert rank["hiding_step_seconds"] is None
        assert (rank["moved_chunks"], rank["moved_but_tail_chunks"]) == (0, 0)
        assert rank["offloaded_bytes_per_step"] == 0
        assert rank["resident_groups_by_step"] == rank["resident_groups_none_by_step"]


def test_a_stage_that_moves_nothing_has_no_say_in_what_hides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first rank has two layers, of which one moves; the others keep the one that they have."""
    shape = ("--schedule", "1F1B", "--pp-size", "4", "--microbatches", "8")
    result = plan(capsys, *shape, "--num-hidden-layers", "5", "--fraction", "0.5")
    first, *others = (rank["hiding_step_seconds"] for rank in result["ranks"])
    assert others == [None] * 3
    assert result["hiding_step_seconds"] == first
    for times, hides in ((1.01, True), (0.99, False)):
        step = ("--step-ms", str(first * times * 1e3), "--num-hidden-layers", "5")
        link = plan(capsys, *shape, *step, "--fraction", "0.5")["ranks"][0]["link"]
        assert link["copies_hide"] == hides


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_is_busy_while_it_computes_and_not_while_it_waits(schedule: str) -> None:
    pp_size = 4
    setup = PipelineSetup(
        schedule=schedule,
        pp_size=pp_size,
        stages_per_rank=SCHEDULES[schedule],
        microbatches=16,
        layers=16,
        attention=AttentionBytes(device=2**20, link=2**20),
        link_bytes_per_second=1e9,
    )
    # All ranks have the same layers, and so the same work in the same step.
    busy = [rank.busy for rank in plan_pipeline(setup).ranks]
    assert busy == pytest.approx([busy[0]] * pp_size)
    assert 0.5 < busy[0] < 1


def test_other_activations_count_at_the_peak_but_are_not_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ("--pp-size", "4", "--microbatches", "8", "--no-grid")
    alone = plan(capsys, *shape)["ranks"]
    heavy = plan(capsys, *shape, "--other-bytes-per-token", "1000000")["ranks"]
    for light, rank in zip(alone, heavy, strict=True):
        in_flight = rank["resident_groups_peak_none"]
        rest = in_flight * 4096 * 1_000_000
        assert rank["peak_bytes_none"] == light["peak_bytes_none"] + rest
        assert rank["peak_bytes"] >= rest
        assert rank["saved_bytes_at_peak"] >= light["saved_bytes_at_peak"]


def test_a_person_reads_a_grid_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--pp-size", "2", "--microbatches", "4", "--step-ms", "500"]) == 0
    text = capsys.readouterr().out
    assert "0SET_GROUP0:TAIL 0F0 0OFFLOAD0" in text
    assert "chunks, and attention groups on the device" in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "DualPipeV"])
def test_a_large_pipeline_takes_seconds(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--pp-size", "64", "--microbatches", "512", "--num-hidden-layers", "256")
    result = plan(capsys, "--schedule", schedule, *shape, "--no-grid")
    assert len(result["ranks"]) == 64
    assert all(r["resident_groups_peak"] <= r["resident_groups_peak_none"] for r in result["ranks"])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--schedule", "2F3B"), "Unknown schedule name '2F3B'"),
        (("--schedule", "PipelineScheduleMulti"), "an abstract class"),
        (("--stages-per-rank", "2"), "2 stages per rank, where this schedule has one"),
        (("--schedule", "ZBVZeroBubble", "--stages-per-rank", "3"), "schedule has two"),
        (("--pp-size", "9"), "8 microbatches for 9 stages"),
        (("--schedule", "DualPipeV", "--pp-size", "5"), "8 microbatches for 10 stages"),
        (("--schedule", "Interleaved1F1B", "--pp-size", "3", "--microbatches", "11"), "3 rounds"),
    ],
)
def test_a_pipeline_that_does_not_exist_is_refused(
    arguments: tuple[str, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--pp-size", "4", "--microbatches", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("AS508")
    assert found in error
