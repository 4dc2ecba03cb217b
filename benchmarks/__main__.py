# SPDX-License-Identifier: Apache-2.0
"""The one entry point: ``--list``, ``run NAME... --out DIR``, ``render DIR``."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.records import result_path, write_record
from benchmarks.runs import RUNS, SCRIPTS, Process, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.list:
        about = {name: run.about for name, run in RUNS.items()} | SCRIPTS
        print("\n".join(f"{name}: {text}" for name, text in about.items()))
        return 0
    if options.action == "run":
        return _run(options)
    if options.action == "process":
        return _process(options)
    if options.action == "render":
        from benchmarks.pages import render  # noqa: PLC0415 - needs matplotlib

        render(options.results, options.docs)
        return 0
    _parser().print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name every run")
    actions = parser.add_subparsers(dest="action")
    run = actions.add_parser("run", help="measure; each mode in a process of its own")
    names = (*RUNS, *SCRIPTS)
    run.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    _common(run)
    run.add_argument("--modes", nargs="+", help="only these")
    run.add_argument("--timeout", type=float, default=300, help="seconds a process may take")
    one = actions.add_parser("process", help="one process of a run; what `run` starts")
    one.add_argument("name", choices=RUNS)
    one.add_argument("number", type=int)
    one.add_argument("--command", default="", help="for the record")
    _common(one)
    pages = actions.add_parser("render", help="tables, plots and summary.json from results")
    pages.add_argument("results", type=Path, nargs="*", help="folders that `run` wrote")
    pages.add_argument("--docs", type=Path, default=ROOT / "docs" / "benchmarks")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_folder, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda", help="cuda, or another accelerator, or cpu")
    parser.add_argument("--shape", help="a preset of the reference trainer")
    parser.add_argument("--tokens", type=int, nargs="+", help="only these points")
    parser.add_argument("--layers", type=int, help="at most so many")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--policy", type=json.loads, default={}, help="SwapPolicy fields as JSON")


def _folder(name: str) -> Path:
    return Path(name).resolve()


def _adapted(run: Run, options: argparse.Namespace) -> Run:
    """Return the run as the options change it."""
    changes: dict[str, Any] = {
        key: value
        for key in ("shape", "steps", "warmup")
        if (value := getattr(options, key)) is not None
    }
    processes = tuple(_adapted_process(process, options) for process in run.processes)
    return replace(run, **changes, processes=processes)


def _adapted_process(process: Process, options: argparse.Namespace) -> Process:
    points = [replace(p, policy={**options.policy, **p.policy}) for p in process.points]
    if options.layers is not None:
        points = [
            replace(p, layers=min(options.layers, p.layers or options.layers)) for p in points
        ]
    if options.tokens is not None:
        known = {point.tokens for point in points}
        if known & set(options.tokens):
            points = [point for point in points if point.tokens in options.tokens]
        else:
            # None of the run's own: the same points at other lengths.
            points = [replace(p, tokens=n) for p in points for n in options.tokens]
            points = list({repr(point): point for point in points}.values())
    return replace(process, points=tuple(points))


def _run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    command = _command(options)
    failed = 0
    for name in options.names:
        if name in SCRIPTS:
            failed += _run_script(name, options)
            continue
        run = _adapted(RUNS[name], options)
        for number, process in enumerate(run.processes):
            if options.modes and process.mode not in options.modes:
                continue
            reason = _start(run, name, number, options=options, command=command)
            failed += reason is not None
            for position, point in enumerate(process.points):
                path = result_path(options.out, name, run, number, position)
                if reason is not None and not path.exists():
                    result = {"outcome": "failed", "reason": reason}
                    write_record(
                        *(path, name, run),
                        number=number,
                        point=point,
                        command=command,
                        result=result,
                    )
    return 1 if failed else 0


def _run_script(name: str, options: argparse.Namespace) -> bool:
    arguments = [f"--out={options.out / name}.json", *_changes(options, policy=False)]
    done = subprocess.run(  # noqa: S603 - this package itself
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        check=False,
    )
    return done.returncode != 0


def _command(options: argparse.Namespace) -> str:
    """Return what the user called, without the folder of the results."""
    modes = ["--modes", *options.modes] if options.modes else []
    return shlex.join(
        ["python", "-m", "benchmarks", "run", *options.names, *_changes(options), *modes]
    )


def _changes(options: argparse.Namespace, *, policy: bool = True) -> list[str]:
    """Return the options that change a run, as its processes take them."""
    changes = [
        f"--{key}={value}"
        for key in ("device", "shape", "layers", "steps", "warmup")
        if (value := getattr(options, key)) is not None
    ]
    if policy and options.policy:
        changes.append(f"--policy={json.dumps(options.policy)}")
    if options.tokens:
        changes += ["--tokens", *map(str, options.tokens)]
    return changes


def _start(
    run: Run, name: str, number: int, *, options: argparse.Namespace, command: str
) -> str | None:
    """Run one process; return why it failed. The next one runs in any case."""
    own = [name, str(number), f"--out={options.out}", f"--command={command}"]
    arguments = [*own, *_changes(options)]
    began = time.perf_counter()
    reason = None
    try:
        done = subprocess.run(  # noqa: S603 - this package itself
            [sys.executable, "-W", "ignore", "-m", "benchmarks", "process", *arguments],
            cwd=ROOT,
            timeout=options.timeout,
            check=False,
        )
        if done.returncode != 0:
            reason = f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"the process took more than {options.timeout:.0f} s"
    seconds = time.perf_counter() - began
    print(f"-- {name} {run.processes[number].mode}: {seconds:.0f} s {reason or ''}", flush=True)
    return reason


def _process(options: argparse.Namespace) -> int:
    from benchmarks.process import run_process  # noqa: PLC0415 - imports torch

    run = _adapted(RUNS[options.name], options)
    run_process(
        options.name,
        run,
        options.number,
        device=options.device,
        out=options.out,
        command=options.command,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
