# SPDX-License-Identifier: Apache-2.0
"""All that is measured on a machine of several GPUs, in one call and within a time.

``python -m benchmarks.gpus --gpus 2 --out out/gpus --budget 520``

What matters most comes first. Each launch of torchrun writes one record for each measurement; a
launch that breaks, or that is stuck, is ended, and the next one goes on behind the measurement
that it was at. ``--device cpu --shape tiny`` tries all of it out without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.results import load
from benchmarks.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PARTS", "Part", "main"]

ROOT: Final = Path(__file__).parents[1]
_LAYERS: Final = 48
_TINY_LAYERS: Final = 4
_TINY_TOKENS: Final = 64
"""What the tokens of a part are divided by for a shape that is no preset of a real model."""
_START_SECONDS: Final = 25.0
"""A launch that has less time left would not get as far as its first step."""
_END_SECONDS: Final = 40.0
"""How long torchrun may take to end its processes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One launch of torchrun.

    Attributes:
        name: Of the part, and without the number of GPUs that of its run.
        run: Name of the run in the records.
        points: Of a pipeline; ``SCHEDULE:STAGESxMICROBATCHESxTOKENS``.
        pp_size: Ranks of a pipeline, where it is one.
        layers: Layers of a rank in a pipeline, of the model otherwise.
        tokens: Tokens of a rank, where it is no pipeline.
        longest: The mode whose longest sequence is looked for.
    """

    name: str
    run: str
    layers: int
    points: tuple[str, ...] = ()
    pp_size: int = 0
    tokens: int = 0
    longest: str | None = None


def _pipeline(name: str, *points: str, gpus: int, pp_size: int = 0) -> Part:
    size = pp_size or gpus
    run = f"pipeline-{gpus}" if size == gpus else f"pipeline-fsdp2-{gpus}"
    return Part(name=name, run=run, points=points, pp_size=size, layers=_LAYERS // size)


_FSDP2_LAYERS: Final = {2: 40, 4: 48}
"""AdamW in bf16 takes 6 bytes a weight, over the ranks. A layer has 623 million weights, embedding
and head 622 million. On 2 GPUs: 48 layers 85 GiB, at 4,096 tokens 43 for activations and 8 for two
gathered layers, their gradients and buffers: 136 of 139 is too close, 40 layers need 71 + 36 + 8 =
115. On 4 GPUs: 48 layers need 43 + 43 + 8 = 94."""
_LONGEST_FROM: Final = {2: {"none": 5120, "attention": 6144}, 4: {"none": 7168, "attention": 8192}}
"""A token takes 9.6 MB with 40 layers (11.2 with 48), and 2.0 (2.4) less with the swap. What the
weights leave, 57 (86) GiB, is full at about 6,400 (8,200) tokens without it and 8,000 (10,400)."""


def _fsdp2(gpus: int) -> tuple[Part, ...]:
    layers, start = _FSDP2_LAYERS[gpus], _LONGEST_FROM[gpus]
    longest = (
        Part(
            name=f"longest-{mode}",
            run=f"longest-{gpus}",
            layers=layers,
            tokens=tokens,
            longest=mode,
        )
        for mode, tokens in start.items()
    )
    return (Part(name="fsdp2", run=f"fsdp2-{gpus}", layers=layers, tokens=4096), *longest)


def _two() -> tuple[Part, ...]:
    fsdp2, *longest = _fsdp2(2)
    first = _pipeline("pipeline", "Interleaved1F1B:2x8x2048", "Interleaved1F1B:2x8x4096", gpus=2)
    more = _pipeline(
        "pipeline-more",
        *("1F1B:1x8x2048", "GPipe:1x8x2048", "Interleaved1F1B:4x8x2048"),
        *("Interleaved1F1B:2x16x2048", "GPipe:1x16x2048"),
        gpus=2,
    )
    rest = _pipeline(
        "pipeline-rest",
        *("GPipe:1x8x4096", "GPipe:1x16x4096"),
        *("Interleaved1F1B:4x8x4096", "Interleaved1F1B:4x16x2048"),
        *("Interleaved1F1B:2x16x4096", "Interleaved1F1B:4x16x4096"),
        gpus=2,
    )
    return (first, fsdp2, more, *longest, rest)


def _four() -> tuple[Part, ...]:
    fsdp2, *longest = _fsdp2(4)
    first = _pipeline("pipeline", "Interleaved1F1B:2x16x2048", "Interleaved1F1B:2x16x4096", gpus=4)
    more = _pipeline(
        "pipeline-more",
        *("1F1B:1x16x2048", "ZBVZeroBubble:2x16x2048"),
        *("1F1B:1x16x4096", "ZBVZeroBubble:2x16x4096"),
        gpus=4,
    )
    both = _pipeline("pipeline-fsdp2", "1F1B:1x8x2048", gpus=4, pp_size=2)
    return (first, fsdp2, more, both, *longest)


PARTS: Final = {2: _two(), 4: _four()}
"""What is run, by number of GPUs, in order of its weight."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts as long as there is time, and print a table."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    broken = 0
    for part in PARTS[options.gpus]:
        if options.only is None or part.name in options.only:
            broken += not _run(part, options, end)
    print("\n".join(table(load([options.out]))))
    return 1 if broken else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--budget", type=float, default=520, help="seconds for everything")
    parser.add_argument("--stall", type=float, default=150, help="seconds without a record")
    parser.add_argument("--device", default="cuda", help="cuda, or another accelerator, or cpu")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a preset of the trainer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--points", type=int, help="at most so many of each pipeline")
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of parts")
    return parser.parse_args(arguments)


def _run(part: Part, options: argparse.Namespace, end: float) -> bool:
    """Launch a part until it is through, time is up, or it gets no further."""
    while True:
        left = end - time.monotonic()
        if left < _START_SECONDS:
            print(f"-- {part.name}: not begun, {left:.0f} s left", flush=True)
            return False
        known = _records(options.out)
        status = _launch(part, options, end)
        print(f"-- {part.name}: {status}, {end - time.monotonic():.0f} s left", flush=True)
        if status == "done":
            return True
        if part.longest is not None:
            # Out of memory is how it ends.
            return _records(options.out) != known
        if _records(options.out) == known:
            return False


def _records(out: Path) -> set[Path]:
    return set(out.glob("*.json"))


def _launch(part: Part, options: argparse.Namespace, end: float) -> str:
    """Run torchrun and watch over it; return how it ended."""
    left = end - time.monotonic()
    process = subprocess.Popen(_command(part, options, time.time() + left), cwd=ROOT)  # noqa: S603
    progress, known = time.monotonic(), _newest(options.out)
    while process.poll() is None:
        time.sleep(0.2)
        now, newest = time.monotonic(), _newest(options.out)
        if newest != known:
            progress, known = now, newest
        if now > end:
            return _end(process, "ended, time is up")
        if now > progress + options.stall:
            return _end(process, f"ended, nothing for {options.stall:.0f} s")
    return "done" if process.returncode == 0 else f"status {process.returncode}"


def _newest(out: Path) -> float:
    return max((path.stat().st_mtime for path in _records(out)), default=0.0)


def _end(process: subprocess.Popen[bytes], status: str) -> str:
    """End torchrun, which ends its processes."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return status


def _command(part: Part, options: argparse.Namespace, until: float) -> list[str]:
    small = options.shape == "tiny"
    layers = _TINY_LAYERS if small else part.layers
    scale = _TINY_TOKENS if small else 1
    module = "benchmarks.pipeline" if part.points else "benchmarks.sharded"
    own = ["python", "-m", "benchmarks.gpus", f"--gpus={options.gpus}"]
    arguments = [
        f"--name={part.run}",
        f"--out={options.out.resolve()}",
        f"--command={shlex.join([*own, *_changes(options)])}",
        f"--until={until}",
        f"--device={options.device}",
        f"--shape={options.shape}",
        f"--layers={layers}",
    ]
    if small:
        arguments.append(f"--policy={json.dumps({'min_bytes': 1024})}")
    if part.points:
        arguments += [f"--pp-size={part.pp_size}", *_counts(options)]
        arguments += [_scaled(point, scale) for point in part.points[: options.points]]
    elif part.longest is None:
        arguments += [f"--tokens={part.tokens // scale}", *_counts(options)]
    else:
        arguments += [f"--tokens={part.tokens // scale}", f"--grow={1024 // scale}"]
        arguments += [f"--longest={part.longest}", "--steps=1", "--warmup=1"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    return [sys.executable, "-W", "ignore", *launcher, "-m", module, *arguments]


def _counts(options: argparse.Namespace) -> list[str]:
    return [f"--steps={options.steps}", f"--warmup={options.warmup}"]


def _changes(options: argparse.Namespace) -> list[str]:
    """Return the options that change a measurement."""
    names = ("device", "shape", "steps", "warmup")
    return [f"--{name}={getattr(options, name)}" for name in names]


def _scaled(point: str, scale: int) -> str:
    head, _, tokens = point.rpartition("x")
    return f"{head}x{int(tokens) // scale}"


if __name__ == "__main__":
    sys.exit(main())
