# SPDX-License-Identifier: Apache-2.0
"""The version matrix, every Transformers release in an environment of its own; and the gates.

    nox -t matrix       the releases that cover every row of every fact, and both ends
    nox -t matrix-all   every minor release
    nox -s canary       the newest release on the index, pre-releases too
    nox -s newest_torch the newest torch that installs here, with the newest tested Transformers
    nox -s coverage     every branch of what decides and refuses is tested
    nox -s wheel        the built wheel, without the source tree beside it: bits and order of copies
    nox -s adapter      the adapter of examples/out_of_tree_adapter, installed as a package
    nox -s examples     every example, as its docstring says to run it
    nox -s docs         the site with warnings as errors, its doctests, docstring coverage

With ``-- --record`` the cells write their results to docs/compatibility.json. An
environment is a small overlay (transformers, hub, tokenizers) over one base with torch and pytest.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"
nox.options.tags = ["matrix"]

ROOT = Path(__file__).parent
RECORD = ROOT / "docs" / "compatibility.json"

TORCH = "2.13.0"
COMMON = (
    "filelock",
    "numpy",
    "packaging",
    "pytest>=9",
    "pytest-timeout>=2.3",
    "pyyaml",
    "regex",
    "requests",
    "safetensors==0.8.0",
    "tqdm",
)

# The newest patch of every minor release. Within a minor no patch changes a fact.
OLD_HUB, MIDDLE_HUB, NEW_HUB = (
    "huggingface-hub==0.36.2",
    "huggingface-hub==1.33.0",
    "huggingface-hub==2.4.0",
)
PINS = {
    ("4.51.3", "4.52.4", "4.53.3", "4.54.1", "4.55.4"): (OLD_HUB, "tokenizers==0.21.4"),
    ("4.56.2", "4.57.6"): (OLD_HUB, "tokenizers==0.22.2"),
    (
        *("5.0.0", "5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1"),
        *("5.9.0", "5.10.4", "5.11.0", "5.12.1", "5.13.1", "5.14.1", "5.15.1"),
    ): (MIDDLE_HUB, "tokenizers==0.22.2"),
    ("5.16.1", "5.17.0"): (MIDDLE_HUB, "tokenizers==0.23.3"),
    ("5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0"): (
        NEW_HUB,
        "tokenizers==0.23.3",
    ),
}
RELEASES = {release: pins for releases, pins in PINS.items() for release in releases}
NEWEST = list(RELEASES)[-1]
COVERING = ("4.51.3", "4.53.3", "4.57.6", "5.1.0", "5.3.0", "5.22.2", "5.23.0", "5.24.0")

MATRIX_TESTS = ("python", "-m", "pytest", "tests/compat", "-m", "matrix", "-q")
DECIDING_TESTS = (
    "tests/api",
    "tests/compat",
    "tests/core/test_left_over_hooks.py",
    "tests/registry",
    "tests/rejections",
    "tests/schedule/test_lowering.py",
    "tests/trainer/test_config.py",
)

# What a broken wheel would show first, and all of what the swap promises of bits and of copies. The
# other tests run against the source tree alone: all of them twice would take half as long again.
WHEEL_TESTS = (
    "tests/api",
    "tests/core",
    "tests/numerics",
    "tests/registry",
    "tests/schedule/test_actions.py",
    "tests/trainer/test_check.py",
    "tests/trainer/test_config.py",
)
BESIDE_THE_PACKAGE = (
    "benchmarks",
    "tests",
    "docs",
    "examples",
    "configs",
    "README.md",
    "Makefile",
    "pyproject.toml",
)


@nox.session(venv_backend="venv")
def matrix_base(session: nox.Session) -> None:
    """Install what every cell shares."""
    session.install(f"torch=={TORCH}", *COMMON)


@nox.session(venv_backend="venv", requires=["matrix_base"])
@nox.parametrize(
    "release",
    [
        nox.param(release, tags=["matrix-all", *(["matrix"] if release in COVERING else [])])
        for release in RELEASES
    ],
)
def transformers(session: nox.Session, release: str) -> None:
    """Run the tests marked ``matrix`` on one release."""
    _overlay(session)
    session.install(f"transformers=={release}", *RELEASES[release])
    result = _run_matrix(session)
    _record(session, "transformers", {"version": release, "result": result, "torch": TORCH})
    if release == NEWEST:
        _record_torch(session, TORCH, result)
    if result == "fail":
        session.error(f"transformers {release} is not supported as it is")


@nox.session(venv_backend="venv")
def newest_torch(session: nox.Session) -> None:
    """Run the tests marked ``matrix`` on the newest torch that installs here."""
    session.install("torch", *COMMON, f"transformers=={NEWEST}", *RELEASES[NEWEST])
    script = "import torch; print(torch.__version__.partition('+')[0])"
    version = str(session.run("python", "-c", script, silent=True)).strip()
    result = _run_matrix(session)
    _record_torch(session, version, result)
    if result == "fail":
        session.error(f"torch {version} is not supported as it is")


@nox.session(venv_backend="venv", requires=["matrix_base"])
def canary(session: nox.Session) -> None:
    """Tell whether the newest Transformers is supported, or which facts to add."""
    _overlay(session)
    session.install("--upgrade", "--pre", "transformers")
    session.run("python", "-m", "activation_swap.compat")
    newer = "ignore:transformers .* is newer:UserWarning"
    # The one test left out says that the release is a tested one.
    session.run(*MATRIX_TESTS, "-W", newer, "-k", "not test_every_fact_holds")


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Ask for every branch of the modules that decide and refuse; no exclusions."""
    session.run(
        *(sys.executable, "-m", "pytest", "-q", "-m", "not level1", *DECIDING_TESTS),
        *("--cov", "--cov-branch", "--cov-config=tests/deciding.coveragerc"),
        *("--cov-report=term-missing:skip-covered", "--cov-fail-under=100"),
    )


@nox.session(venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """Build the sdist, the wheel from it, and test that wheel with no source tree beside it."""
    built, beside = Path(session.create_tmp(), "built"), Path(session.create_tmp(), "beside")
    for folder in (built, beside):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(built), silent=True)
    (found,) = built.glob("*.whl")
    _borrow(session)
    session.install("--no-deps", "--force-reinstall", str(found))
    for name in BESIDE_THE_PACKAGE:
        ignore = shutil.ignore_patterns("_build", "__pycache__")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, beside / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, beside / name)
    session.chdir(beside)
    script = "import activation_swap; print(activation_swap.__file__)"
    where = str(session.run("python", "-c", script, silent=True)).strip()
    if not where.startswith(_purelib(session, "python")):
        session.error(f"the tests would run against {where}")
    session.run("python", "-m", "pytest", "-q", "-m", "not level1", *WHEEL_TESTS)
    session.run("activation-swap", "check")


@nox.session(venv_backend="venv")
def adapter(session: nox.Session) -> None:
    """Install the sample package beside this one, and run its tests."""
    _borrow(session)
    session.install("--no-deps", "--editable", ".")
    session.install("--no-deps", "--force-reinstall", "examples/out_of_tree_adapter")
    session.chdir("examples/out_of_tree_adapter")
    session.run("python", "-m", "pytest", "-q")


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Run every example by the command in its docstring, then test the sample adapter."""
    scripts = Path(sysconfig.get_path("scripts"))
    for path in sorted(Path(ROOT, "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        command = re.search(r"^ +((?:python|torchrun) .*)$", text, flags=re.MULTILINE)
        if command is None:
            session.error(f"{path} does not say how to run it")
        program, *arguments = shlex.split(command.group(1))
        session.run(str(scripts / program), *arguments, env={"OMP_NUM_THREADS": "1"})
    session.notify("adapter")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site, run what it shows, and ask for a docstring on everything public."""
    python = (sys.executable, "-m")
    session.run(sys.executable, "docs/generate_pages.py", "--check")
    for builder in ("html", "doctest"):
        options = ("-W", "-n", "--keep-going", "-q", "-b", builder)
        session.run(*python, "sphinx", *options, "docs", f"docs/_build/{builder}")
    session.run(*python, "interrogate", "--quiet", "activation_swap")


def _borrow(session: nox.Session) -> None:
    """Put the packages of the calling environment, but none of its editable ones, on the path."""
    borrowed = sysconfig.get_path("purelib")
    Path(_purelib(session, "python"), "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")


def _overlay(session: nox.Session) -> None:
    """Put the base behind the session's own packages on its path."""
    own = _purelib(session, "python")
    base = _purelib(session, str(ROOT / ".nox" / "matrix_base" / "bin" / "python"))
    Path(own, "matrix_base.pth").write_text(f"{base}\n", encoding="utf-8")


def _purelib(session: nox.Session, python: str) -> str:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    out = session.run(python, "-c", script, silent=True, external=True)
    return str(out).strip()


def _run_matrix(session: nox.Session) -> str:
    try:
        session.run(*MATRIX_TESTS)
    except CommandFailed:
        return "fail"
    return "pass"


def _record_torch(session: nox.Session, version: str, result: str) -> None:
    row = {"version": version, "result": result, "transformers": NEWEST, "device": "CPU"}
    _record(session, "torch", row)


def _record(session: nox.Session, table: str, row: dict[str, str]) -> None:
    if "--record" not in session.posargs:
        return
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    rows = {known["version"]: known for known in record.get(table, [])} | {row["version"]: row}
    numbers = {version: [int(part) for part in version.split(".")] for version in rows}
    record[table] = [rows[version] for version in sorted(rows, key=numbers.__getitem__)]
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
