# SPDX-License-Identifier: Apache-2.0
"""What the documentation promises of itself: pages with a purpose, and nothing public left out."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

import activation_swap
from activation_swap import KeepReason, SwapPolicy, SwapStats, adapters, errors, testing
from activation_swap.trainer.__main__ import COMMANDS

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(
    path for folder in ("guide", "explanation", "reference") for path in DOCS.glob(f"{folder}/*.md")
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_a_page_begins_with_what_it_is_for(path: Path) -> None:
    title, _, purpose = path.read_text("utf-8").splitlines()[:3]

    assert title.startswith("# ")
    assert purpose.startswith("This page ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "reference/api.md",
            [*activation_swap.__all__, *testing.__all__, *errors.__all__, *adapters.__all__],
        ),
        ("reference/command-line.md", [*COMMANDS]),
        ("guide/choose-a-policy.md", [field.name for field in dataclasses.fields(SwapPolicy)]),
    ],
)
def test_nothing_public_is_left_out(name: str, words: list[str]) -> None:
    text = page(name)
    elsewhere = {
        "errors": "its own heading",
        "BUILT_IN": "of interest to this package alone",
    }

    assert [word for word in words if word not in elsewhere and word not in text] == []


def test_an_adapter_finds_the_reasons_that_it_names() -> None:
    example = ROOT / "examples" / "out_of_tree_adapter" / "src" / "pebble" / "adapter.py"
    named = set(re.findall(r"Reason\.[A-Z_]+", example.read_text("utf-8")))

    assert named
    assert [name for name in sorted(named) if f"`{name}`" not in page("errors.md")] == []


def test_the_glossary_is_sorted() -> None:
    block = page("reference/glossary.md").split("```{glossary}")[1]
    terms = re.findall(r"^(\w.*)$", block, flags=re.MULTILINE)

    assert len(terms) > 30
    assert "Also:" not in block, "one meaning for each term"
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("name", ["../README.md", "index.md", "guide/when-not-to-use.md"])
def test_what_it_costs_is_said_where_people_decide(name: str) -> None:
    rows = json.loads(page("benchmarks/summary.json"))
    single = [row for row in rows if (row["name"], row["mode"]) == ("single", "attention")]

    assert len(single) > 3
    for row in single:
        (line,) = re.findall(rf"^\| {row['tokens']:,} .*", page(name), flags=re.MULTILINE)
        ratio = row["step_time_ratio"]
        assert "out of memory" in line if ratio is None else f"| {ratio:.3f} |" in line


BLOCKS = runpy.run_path(str(DOCS / "figures.py"))["BLOCKS"]
OTHER_SET_UPS = ["fsdp2", "fsdp2-2", "lora", "pipeline-stage", "pipeline-2"]


@pytest.mark.parametrize("run", OTHER_SET_UPS)
@pytest.mark.parametrize("name", ["../README.md", "index.md", "guide/when-not-to-use.md"])
def test_what_other_set_ups_cost_is_said_there_with_the_drift(name: str, run: str) -> None:
    rows = [row for row in json.loads(page("benchmarks/summary.json")) if row["name"] == run]
    text = page(name)

    for mode in ("attention", "none"):
        ratios = [row["step_time_ratio"] for row in rows if row["mode"] == mode]
        assert ratios
        # Of `none` the faster time is 1 by definition; the sentence has the extremes of all runs.
        if mode == "attention" or "elsewhere" in text:
            for ratio in {min(ratios), max(ratios)} - {1.0}:
                assert f"{ratio:.3f}" in text
    assert re.search(r"`none` (was\s+measured\s+)?again", text)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_figures_say_where_a_note_on_them_is(name: str) -> None:
    rows = json.loads(page("benchmarks/summary.json"))
    plain = [{key: value for key, value in row.items() if key != "note"} for row in rows]
    noted = [row | {"note": "the machine was busy"} for row in plain]

    assert "conditions" not in "\n".join(BLOCKS[name](plain))
    assert "the benchmarks' pages name" in "\n".join(BLOCKS[name](noted))


def test_counters_of_the_policy_page_exist() -> None:
    table = page("guide/choose-a-policy.md").partition("## How to see")[2]
    named = set(re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE))

    assert named
    assert named <= {field.name for field in dataclasses.fields(SwapStats)}
    assert set(re.findall(r'kept_bytes\["(\w+)"\]', table)) <= set(KeepReason)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it(path: Path) -> None:
    text = path.read_text("utf-8")

    assert path.name in (ROOT / "examples" / "README.md").read_text("utf-8")
    assert re.search(rf"^ +(python|torchrun) .*examples/{path.name}", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    [*EXAMPLES, *sorted((ROOT / "examples").glob("*/src/*/*.py")), *WRITTEN, ROOT / "README.md"],
    ids=place,
)
def test_what_is_shown_imports_public_names_only(path: Path) -> None:
    text = path.read_text("utf-8")
    imports = re.findall(
        r"from (activation_swap[\w.]*) import (?:\(([^)]*)\)|(.*))", text, flags=re.MULTILINE
    )
    names = {name for _, *several in imports for name in re.findall(r"\w+", " ".join(several))}
    assert [name for name in sorted(names) if name not in page("reference/api.md")] == []
    assert not any("._" in module or ".core" in module for module, *_ in imports), "private"


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_make_targets_that_are_named_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    text = (ROOT / name).read_text("utf-8")

    for command in re.findall(r"`make ([a-z -]+)`", text):
        for target in command.split():
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


BESIDE_THE_SITE = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "changelog.d" / "README.md",
]


def anchors(path: Path) -> set[str]:
    """Return the anchors that a heading of a Markdown file has on the web."""
    titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", BESIDE_THE_SITE, ids=place)
def test_links_outside_of_the_site_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", path.read_text("utf-8")):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("path", [*BESIDE_THE_SITE, *sorted(DOCS.rglob("*.md"))], ids=place)
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    folders = "tests|docs|examples|benchmarks|configs|activation_swap|adapters|compat|core|trainer"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)(?:::(\w+))?`", path.read_text("utf-8"))
    for name, test in named:
        found = [root / name for root in (ROOT, ROOT / "activation_swap") if (root / name).exists()]
        if "FAMILY" not in name:
            assert found, name
        assert not test or f"def {test}(" in found[0].read_text("utf-8"), test


def test_fragments_have_a_kind() -> None:
    kinds = {"added", "changed", "deprecated", "removed", "fixed"}
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]

    assert all(re.fullmatch(r"\+[a-z0-9-]+\.(\w+)\.md", path.name) for path in fragments)
    assert {path.suffixes[-2].lstrip(".") for path in fragments} <= kinds
