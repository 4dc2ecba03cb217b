# SPDX-License-Identifier: Apache-2.0
"""LoRA on q, k, v, o of all 48 layers of the 30B shape, base weights frozen in bf16.

``none`` twice and ``attention``, each in a process of its own::

    python -m benchmarks.lora --out out/lora.json

The adapters are fp32, as PEFT makes them, and AdamW trains them; its learning rate is 0, so that
every step of every mode starts from the same weights, while the same kernels run.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from activation_swap.trainer.device import resolve_device
from benchmarks.machine import facts
from benchmarks.model import build, trainable
from benchmarks.pair import StepRecorder, add_options, compare, run_steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode."""
    device = resolve_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    base = build(options.shape, device=options.device, layers=options.layers)
    torch.manual_seed(0)
    config = LoraConfig(
        r=options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        # Both matrices random: with one of them 0, half of the gradients are 0.
        init_lora_weights=False,
    )
    model: Any = get_peft_model(base, config)
    recorder = StepRecorder(
        dict(trainable(model)), lambda p: torch.optim.AdamW([p], lr=0.0, weight_decay=0.0)
    )
    result = run_steps(options.mode, model, base, recorder, options=options, device=device)
    return {**result, "rank": options.rank, "machine": facts(options.device)}


def main() -> None:
    """Compare the modes, or measure one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, layers=48)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    options = parser.parse_args()
    if options.mode is None:
        compare("benchmarks.lora", options, "rank")
    else:
        print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
