# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with one callback more.

Run it with::

    python examples/hf_trainer.py

The same callback serves TRL's trainers. It refuses arguments that do not go with a swap, such as
``torch_compile`` and ``gradient_checkpointing``, which TRL turns on unless it is told not to.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from activation_swap.trainer import ActivationSwapCallback

SEQUENCE = 1024


def main() -> None:
    """Train a few steps; the Trainer prints its logs, with the swap's counters in them."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (6, SEQUENCE))]
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=2,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=rows, callbacks=[ActivationSwapCallback()]
        )
        trainer.train()


if __name__ == "__main__":
    main()
