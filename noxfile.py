"""The version matrix: every supported Transformers release in an environment of its own.

    nox -t matrix       the releases that cover every row of every fact, and both ends
    nox -t matrix-all   every minor release
    nox -s canary       the newest release on the index, pre-releases too
    nox -s newest_torch the newest torch that installs here, with the newest tested Transformers
    nox -s coverage     every branch of what decides and refuses is tested

With ``-- --record`` the cells write their results to docs/compatibility.json. An
environment is a small overlay (transformers, hub, tokenizers) over one base with torch and pytest.
"""

from __future__ import annotations

import json
import sys
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
    "tests/registry",
    "tests/rejections",
    "tests/schedule/test_lowering.py",
    "tests/trainer/test_config.py",
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
