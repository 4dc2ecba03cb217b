# SPDX-License-Identifier: Apache-2.0
"""The runs: which modes are measured at which points. Data only; nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PEERS",
    "RANK_RUNS",
    "RUNS",
    "SCRIPTS",
    "STAGE_RUNS",
    "Point",
    "Process",
    "Run",
    "full_shape",
]

MIB: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: warm-up and timed steps of one set-up.

    Attributes:
        tokens: Tokens in a microbatch of one sequence.
        layers: Decoder layers, or ``None`` for the shape's.
        microbatches: Forwards and backwards in a step.
        policy: Fields of ``SwapPolicy`` that are not the default.
        trace: Whether one more step is profiled, for the timeline.
    """

    tokens: int
    layers: int | None = None
    microbatches: int = 1
    policy: Mapping[str, Any] = field(default_factory=dict)
    trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Process:
    """What one process measures: the model is built once, the points follow each other.

    Attributes:
        mode: See :mod:`benchmarks.modes`.
        points: In order; the number of layers never grows.
        repeat: Tells processes of one run apart that measure the same.
    """

    mode: str
    points: tuple[Point, ...]
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A set of processes, run one after the other.

    Attributes:
        about: One sentence.
        processes: What is measured.
        shape: A preset of the reference trainer.
        warmup: Steps before the timed ones; the first may set up pools.
        steps: Timed steps.
        lr: Of the SGD applied inside backward. With 0 its kernels run and every step of every mode
            starts from the same weights, so that losses and gradients can be compared although the
            kernels that users train with do not repeat themselves bit for bit.
        update: Whether gradients are applied: without copies they are garbage.
        deterministic: Whether all steps use deterministic algorithms, not only the last one, whose
            gradients are digested.
    """

    about: str
    processes: tuple[Process, ...]
    shape: str = "qwen3-30b-a3b"
    warmup: int = 3
    steps: int = 8
    lr: float = 0.0
    update: bool = True
    deterministic: bool = False


PEERS: Final = (
    "save_on_cpu",
    "checkpointing",
    "megatron",
    "trl",
    "torchtune",
)


def full_shape(*tokens: int, **changes: Any) -> tuple[Point, ...]:
    """Return a point for each number of tokens."""
    return tuple(Point(tokens=number, **changes) for number in tokens)


def _sweep(key: str, *values: int) -> tuple[Point, ...]:
    return tuple(Point(tokens=4096, policy={key: value}) for value in values)


RUNS: Final[dict[str, Run]] = {
    "single": Run(
        about="One GPU, the 30B shape: none against attention, 1,024 to 8,192 tokens.",
        processes=(
            Process(mode="none", points=full_shape(1024, 2048, 4096, 7168, 8192)),
            Process(
                mode="attention",
                # The profiled step is the last one: a profiler slows what follows it.
                points=(*full_shape(1024, 2048, 7168, 8192), Point(tokens=4096, trace=True)),
            ),
        ),
    ),
    "peers": Run(
        about="The same step at 4,096 tokens with what a user could take instead.",
        processes=tuple(
            Process(mode=mode, points=full_shape(4096)) for mode in ("none", "attention", *PEERS)
        ),
        steps=5,
        warmup=2,
    ),
    "growth": Run(
        about="Bytes and time over layers and microbatches, both modes.",
        processes=tuple(
            Process(
                mode=mode,
                points=(
                    *(Point(tokens=2048, layers=layers) for layers in (48, 36, 24, 12)),
                    *(
                        Point(tokens=2048, layers=12, microbatches=microbatches)
                        for microbatches in (2, 4)
                    ),
                ),
            )
            for mode in ("none", "attention")
        ),
        steps=5,
        warmup=2,
    ),
    "threshold": Run(
        about="Step time over the smallest storage that moves, and over the slab size.",
        processes=(
            Process(mode="none", points=full_shape(4096)),
            Process(
                mode="attention",
                points=(
                    *_sweep("min_bytes", *(size * MIB for size in (1, 4, 8, 16, 32))),
                    *_sweep("slab_bytes", *(size * MIB for size in (16, 256, 1024))),
                ),
            ),
        ),
        steps=6,
        warmup=2,
    ),
    "cost": Run(
        about="What the hooks cost the CPU when nothing is copied, in ms per layer and step.",
        processes=tuple(
            Process(mode=mode, points=full_shape(1024, 4096)) for mode in ("none", "no_copies")
        ),
        update=False,
    ),
    "equality": Run(
        about="Losses and gradients, bit for bit, under deterministic algorithms and real updates.",
        processes=(
            Process(mode="none", points=full_shape(4096)),
            Process(mode="none", points=full_shape(4096), repeat=1),
            Process(mode="attention", points=full_shape(4096)),
        ),
        warmup=1,
        steps=3,
        lr=1e-2,
        deterministic=True,
    ),
}
"""Every run by its name."""

SCRIPTS: Final[dict[str, str]] = {
    "fsdp2": "FSDP2 with AdamW on one GPU, 24 layers: none twice and attention.",
    "lora": "LoRA on q, k, v, o with a frozen base on one GPU: none twice and attention.",
}
"""Runs that are modules of their own, ``benchmarks.NAME``: another model, another optimizer."""

STAGE_RUNS: Final[dict[str, str]] = {
    "pipeline-stage": "One stage of a pipeline on one GPU, stage 0 of 4, without the others.",
}
"""The run of :mod:`benchmarks.stage`."""

RANK_RUNS: Final[dict[str, str]] = {
    "pipeline-2": "A pipeline over two GPUs: 24 layers a rank.",
    "pipeline-4": "A pipeline over four GPUs: 12 layers a rank.",
    "pipeline-fsdp2-4": "A pipeline of two ranks, each stage sharded over two: four GPUs.",
    "fsdp2-2": "FSDP2 with AdamW in bf16 over two GPUs.",
    "fsdp2-4": "FSDP2 with AdamW in bf16 over four GPUs.",
    "longest-2": "The longest sequence that FSDP2 over two GPUs can train on, without and with.",
    "longest-4": "The longest sequence that FSDP2 over four GPUs can train on, without and with.",
}
"""Runs of :mod:`benchmarks.gpus`, which a machine of several GPUs makes in one call."""
