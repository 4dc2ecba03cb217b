# SPDX-License-Identifier: Apache-2.0
"""A 1F1B loop of one's own that moves attention's saved tensors through ``Swap.groups``.

    python examples/one_f_one_b.py

Two processes, one pipeline stage each, send activations and gradients through gloo. A trainer with
a pipeline runtime of its own does the same three things: it says in which order a rank computes,
plans that order, and surrounds each compute call with ``ScheduleRunner.compute``. Microbatches may
have different lengths, since nothing here depends on sizes.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from activation_swap import Swap, SwapPolicy, TrainingSetup, registry
from activation_swap.pipelining import (
    Action,
    Kind,
    ScheduleRunner,
    one_f_one_b_order,
    plan_rank,
)
from activation_swap.trainer.stage import Stage, prune

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES = 2
LAYERS = 3  # per stage
HIDDEN = 64
VOCABULARY = 97
LENGTHS = (64, 96, 48, 80)  # tokens of each microbatch


def main() -> None:
    """Start one process per stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(train, args=(f"tcp://127.0.0.1:{port}",), nprocs=STAGES)


def train(rank: int, address: str) -> None:
    """Run the same step without and with the swap, and compare every bit."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=STAGES)
    model, stage = build_stage(rank)
    tokens = [torch.randint(VOCABULARY, (1, length)) for length in LENGTHS]

    expected = step(stage, rank, tokens, swap=registry.apply("none", model))
    swap = registry.apply(
        "attention",
        model,
        setup=TrainingSetup(pp_size=STAGES),
        policy=SwapPolicy(min_bytes=2048),  # this model is tiny
    )
    swapped = step(stage, rank, tokens, swap=swap)

    stats = swap.stats()
    equal = all(torch.equal(a, b) for a, b in zip(expected, swapped, strict=True))
    print(
        f"rank {rank}: losses and gradients equal: {equal}, "
        f"offloaded {stats.offloaded_bytes:,} bytes, {stats.reload_misses} reload misses"
    )
    swap.remove()
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


def step(
    stage: Stage, rank: int, tokens: Sequence[torch.Tensor], *, swap: Swap
) -> list[torch.Tensor]:
    """Run forward and backward of every microbatch in 1F1B order.

    Returns:
        The losses of the last stage, then every gradient of this one.
    """
    stage.zero_grad()
    order = one_f_one_b_order(stage=rank, stages=STAGES, microbatches=len(tokens))
    microbatches = Microbatches(stage, rank, tokens)
    runner = ScheduleRunner(swap.groups)  # one for all steps, in a real loop; and so the plan
    runner.begin_step(plan_rank(order, attentions={rank: LAYERS}))
    for scheduled in order:
        for action in scheduled.members:
            with runner.compute(action):
                microbatches.compute(action)
    microbatches.finish()
    gradients = [weight.grad for weight in stage.parameters() if weight.grad is not None]
    return [*microbatches.losses, *(gradient.clone() for gradient in gradients)]


class Microbatches:
    """What a stage computes, receives and sends, without any thought of the swap."""

    def __init__(self, stage: Stage, rank: int, tokens: Sequence[torch.Tensor]) -> None:
        self.losses: list[torch.Tensor] = []
        self._stage = stage
        self._rank = rank
        self._tokens = tokens
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._sends: list[Any] = []

    def compute(self, action: Action) -> None:
        """Do what the schedule says."""
        if action.kind is Kind.FORWARD:
            self.forward(action.microbatch)
        else:
            self.backward(action.microbatch)

    def forward(self, microbatch: int) -> None:
        """Receive (or read) the input of a microbatch, compute, send (or take the loss)."""
        tokens = self._tokens[microbatch]
        value = tokens
        if not self._stage.first:
            value = torch.empty((*tokens.shape, HIDDEN))
            dist.recv(value, self._rank - 1, tag=microbatch)
            value.requires_grad_()
        output = self._stage(value)
        if self._stage.last:
            output = functional.cross_entropy(output[0, :-1], tokens[0, 1:]) / len(self._tokens)
            self.losses.append(output.detach())
        else:
            self._send(output.detach(), self._rank + 1, microbatch)
        self._inputs[microbatch], self._outputs[microbatch] = value, output

    def backward(self, microbatch: int) -> None:
        """Receive the gradient of the output, compute, send that of the input."""
        value, output = self._inputs.pop(microbatch), self._outputs.pop(microbatch)
        gradient = None
        if not self._stage.last:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self._rank + 1, tag=microbatch)
        output.backward(gradient)
        if value.grad is not None:
            self._send(value.grad, self._rank - 1, microbatch)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sends:
            work.wait()

    def _send(self, value: torch.Tensor, peer: int, microbatch: int) -> None:
        self._sends.append((dist.isend(value, peer, tag=microbatch), value))


def build_stage(rank: int) -> tuple[Qwen3MoeForCausalLM, Stage]:
    """Return this rank's part of a tiny model: what the swap takes, and what is called."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=STAGES * LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)  # the same model, and below the same tokens, on every rank
    ends = {"first": rank == 0, "last": rank == STAGES - 1}
    layers = range(rank * LAYERS, (rank + 1) * LAYERS)
    model = prune(Qwen3MoeForCausalLM(config).train(), layers, **ends)
    return model, Stage(model, **ends)


if __name__ == "__main__":
    main()
