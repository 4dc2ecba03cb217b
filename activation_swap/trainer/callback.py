# SPDX-License-Identifier: Apache-2.0
"""Activation swap in Hugging Face's ``Trainer`` and in what is built on it, such as TRL's."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from activation_swap._config import TrainingSetup
from activation_swap._registry import registry
from activation_swap._stats import SwapStats
from activation_swap._swap import Swap

if TYPE_CHECKING:
    from activation_swap._config import SwapPolicy

__all__ = ["ActivationSwapCallback"]

_LOGGED = tuple(field.name for field in fields(SwapStats) if field.name != "kept_bytes")


class ActivationSwapCallback(TrainerCallback):  # type: ignore[misc] # transformers has no types here
    """Applies the swap when training begins, logs its counters, removes it when training ends.

    ``Trainer(model, args, callbacks=[ActivationSwapCallback()])``

    Each log gets ``activation_swap/...`` values: the counters of :class:`SwapStats` since the log
    before, in bytes or numbers. They are in ``trainer.state.log_history``, and in what callbacks
    after this one report.

    A training that raises leaves the swap on the model: train on, or call ``swap.remove()``.

    Args:
        mode: Value of the trainer's key ``activation_swap``.
        policy: What moves. (Default: ``SwapPolicy()``)

    Attributes:
        swap: The handle; inactive outside of training.
    """

    def __init__(self, mode: str = "attention", *, policy: SwapPolicy | None = None) -> None:
        self.swap = Swap()
        self._mode = mode
        self._policy = policy

    def on_train_begin(
        self, args: Any, _state: Any, _control: Any, *, model: Any, **_: Any
    ) -> None:
        """Apply the swap to the model inside of PEFT's wrapper.

        Raises:
            RejectedError: The arguments ask for compilation or for activation checkpointing, or
                the model is not supported.
            UnsupportedBackendError: The arguments ask for DeepSpeed.
        """
        # Trainer keeps the model inside of DDP and DataParallel apart; PEFT's it trains as it is.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.swap = registry.apply(self._mode, base, setup=_setup(args), policy=self._policy)
        self.swap.reset_stats()

    def on_log(
        self, _args: Any, state: Any, _control: Any, *, logs: dict[str, Any], **_: Any
    ) -> None:
        """Add the counters to this log, unless no training forward came since the last one."""
        stats = self.swap.stats()
        if not (stats.offloaded_bytes or stats.kept_bytes):
            return
        self.swap.reset_stats()
        values = {f"activation_swap/{name}": getattr(stats, name) for name in _LOGGED}
        values |= {
            f"activation_swap/kept_bytes/{reason}": nbytes
            for reason, nbytes in stats.kept_bytes.items()
        }
        logs.update(values)
        state.log_history[-1].update(values)

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Take the swap off the model."""
        self.swap.remove()


def _setup(args: Any) -> TrainingSetup:
    checkpointing = args.gradient_checkpointing or (args.fsdp_config or {}).get(
        "activation_checkpointing"
    )
    return TrainingSetup(
        backend="deepspeed" if args.deepspeed else "pytorch",
        compile=args.torch_compile,
        activation_checkpoint="TrainingArguments" if checkpointing else "off",
    )
