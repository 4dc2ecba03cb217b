# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with AdamW in bf16: 24 layers of the 30B shape on a mesh of one rank.

One GPU, ``none`` twice and ``attention``, each in a process of its own::

    python -m benchmarks.fsdp2 --out out/fsdp2.json

Over more GPUs :mod:`benchmarks.sharded` trains the same.

AdamW steps inside backward, so that no two gradients live at once; its learning rate is 0, so that
every step of every mode starts from the same weights, while the same kernels run.
"""

from __future__ import annotations

import argparse
import json
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from activation_swap.trainer.device import resolve_device
from benchmarks.machine import facts
from benchmarks.model import build, trainable
from benchmarks.pair import StepRecorder, add_options, compare, run_steps


def build_sharded(
    options: argparse.Namespace, device: torch.device, mesh: DeviceMesh
) -> tuple[Any, StepRecorder]:
    """Build the model, shard it layer by layer, and give every weight its AdamW.

    Args:
        options: ``shape`` and ``layers``.
        device: Of this rank.
        mesh: All ranks.
    """
    model = build(options.shape, device=str(device), layers=options.layers)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fused = device.type != "cpu"
    recorder = StepRecorder(
        dict(trainable(model)),
        lambda p: torch.optim.AdamW([p], lr=0.0, weight_decay=0.0, fused=fused),
    )
    return model, recorder


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode on this rank of an initialised process group."""
    device = resolve_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    model, recorder = build_sharded(options, device, init_device_mesh(device.type, (1,)))
    result = run_steps(options.mode, model, model, recorder, options=options, device=device)
    return {**result, "ranks": 1, "machine": facts(options.device)}


def main() -> None:
    """Compare the modes, or measure one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, layers=24)
    options = parser.parse_args()
    if options.mode is None:
        compare("benchmarks.fsdp2", options)
        return
    with TemporaryDirectory() as directory:
        dist.init_process_group(init_method=f"file://{directory}/peers", rank=0, world_size=1)
        print(json.dumps(measure(options)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
