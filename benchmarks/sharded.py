# SPDX-License-Identifier: Apache-2.0
r"""FSDP2 with AdamW in bf16 over the ranks of torchrun.

``none``, ``attention`` and ``none`` again in the same processes::

    torchrun --nproc-per-node=2 -m benchmarks.sharded --name fsdp2-2 --out out/gpus \
        --layers 40 --tokens 4096

Or, with ``--longest MODE``, one mode at lengths that grow by ``--grow`` from ``--tokens`` on, up to
where a rank runs out of memory. That ends the processes: the lengths before it are measured.
"""

from __future__ import annotations

import argparse
import gc
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from activation_swap import Swap, SwapPolicy, registry
from activation_swap.trainer.device import peak_device_bytes, reset_peak_device_bytes, synchronize
from activation_swap.trainer.ranks import join_ranks
from benchmarks.fsdp2 import build_sharded
from benchmarks.pair import run_steps, train_step
from benchmarks.rank_figures import combine, reserved_bytes, swap_figures
from benchmarks.ranks import Records, add_rank_options, describe_ranks, free_memory, gather, set_up

if TYPE_CHECKING:
    from activation_swap.trainer.ranks import Ranks

_MODES: Final = ("none", "attention", "none")
_LENGTHS_AT_MOST: Final = 10
_SEED: Final = 1


def _compare(options: argparse.Namespace, ranks: Ranks, records: Records) -> None:
    """Measure the modes one after the other."""
    model, recorder = build_sharded(options, ranks.device, ranks.data)
    for position, mode in enumerate(_MODES):
        name = f"{options.name}-{options.tokens}-{position}-{mode}"
        if records.outcome(name) is not None:
            continue
        if not records.time_left():
            return
        gc.collect()
        free_memory(ranks.device)
        with records.measurement(name, _facts(options, mode, position > 1)) as figures:
            own = run_steps(
                mode,
                model,
                model,
                recorder,
                options=options,
                device=ranks.device,
                seed=_SEED + dist.get_rank(),
            )
            figures.update(_combined(own, ranks.device))


def _longest(options: argparse.Namespace, ranks: Ranks, records: Records) -> None:
    """Train at growing lengths until a rank runs out of memory, or time is up."""
    mode = options.longest
    model, _ = build_sharded(options, ranks.device, ranks.data)
    policy = SwapPolicy(**options.policy)
    swap = Swap() if mode == "none" else registry.apply(mode, model, policy=policy)
    lengths = count(options.tokens, options.grow)
    for tokens, _ in zip(lengths, range(_LENGTHS_AT_MOST), strict=False):
        if not records.time_left():
            return
        options.tokens = tokens
        gc.collect()
        free_memory(ranks.device)
        generator = torch.Generator(ranks.device).manual_seed(_SEED + dist.get_rank())
        batch = torch.randint(
            model.config.vocab_size, (1, tokens), device=ranks.device, generator=generator
        )
        name = f"{options.name}-{mode}-{tokens:06d}"
        with records.measurement(name, _facts(options, mode, repeat=False)) as figures:
            for _ in range(options.warmup):
                train_step(model, batch)
            reset_peak_device_bytes(ranks.device)
            swap.reset_stats()
            steps = [_timed(model, batch, ranks.device) for _ in range(options.steps)]
            own = {
                "step_ms_all": [elapsed for elapsed, _ in steps],
                "peak_bytes": peak_device_bytes(ranks.device),
                "losses": [float(loss) for _, loss in steps],
                "gradient_digest": "",
                **swap_figures(swap, options.steps),
            }
            figures.update(_combined(own, ranks.device))
            # Without a step under deterministic algorithms nothing can be said of gradients.
            figures["gradient_digest"] = None


def _timed(model: Any, batch: torch.Tensor, device: torch.device) -> tuple[float, torch.Tensor]:
    synchronize(device)
    began = time.perf_counter()
    loss = train_step(model, batch)
    synchronize(device)
    return 1e3 * (time.perf_counter() - began), loss


def _combined(own: dict[str, Any], device: torch.device) -> dict[str, Any]:
    named = {"rank": dist.get_rank(), "peak_reserved_bytes": reserved_bytes(device), **own}
    figures = combine(gather(named))
    # Of each rank: they hold the same share of the weights, and as many tokens.
    fullest = max(figures["ranks"], key=lambda rank: rank["peak_bytes"] or 0)
    return {**figures, "eligible_bytes": fullest["saved_bytes"] or None}


def _facts(options: argparse.Namespace, mode: str, repeat: bool) -> dict[str, Any]:  # noqa: FBT001 - of a record
    point = {
        "tokens": options.tokens,
        "layers": options.layers,
        "microbatches": 1,
        "policy": options.policy,
    }
    return {"mode": mode, "repeat": int(repeat), "point": point}


def main() -> None:
    """Compare the modes, or look for the longest sequence of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rank_options(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--longest", choices=("none", "attention"), help="grow the length")
    parser.add_argument("--grow", type=int, default=1024, help="tokens from one length to the next")
    options = parser.parse_args()
    with join_ranks(device=options.device, pp_size=1) as ranks:
        set_up(ranks.device)
        options.out.mkdir(parents=True, exist_ok=True)
        records = Records.of(
            options,
            describe_ranks(ranks.device),
            optimizer="AdamW in bf16 inside backward, gradients freed at once, lr 0",
        )
        (_longest if options.longest else _compare)(options, ranks, records)


if __name__ == "__main__":
    main()
