# SPDX-License-Identifier: Apache-2.0
"""``ActivationSwapCallback``: what it reads, logs and leaves behind."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import Trainer

from activation_swap import SwapPolicy
from activation_swap.errors import ActivationSwapError, Reason
from activation_swap.trainer import ActivationSwapCallback
from tests.compose.run import EVERYTHING
from tests.compose.tiny_model import tiny_model
from tests.compose.trainers import arguments, rows

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.level0


def training_arguments(**values: Any) -> SimpleNamespace:
    """Return the arguments that the callback reads."""
    defaults = {
        "torch_compile": False,
        "gradient_checkpointing": False,
        "fsdp_config": None,
        "deepspeed": None,
    }
    return SimpleNamespace(**(defaults | values))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(directory: Path, callback: ActivationSwapCallback) -> tuple[Any, list[dict[str, Any]]]:
    model = tiny_model()
    args = arguments(str(directory), max_steps=2)
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=[callback])
    trainer.train()
    return model, trainer.state.log_history


def test_each_step_logs_its_own_counters(tmp_path: Path) -> None:
    callback = ActivationSwapCallback(policy=EVERYTHING)
    model, history = train(tmp_path, callback)
    *steps, summary = history
    assert len(steps) == 2
    for log in steps:
        assert log["activation_swap/saved_bytes"] == 224640
        assert log["activation_swap/reload_misses"] == 0
        assert log["activation_swap/kept_bytes/last"] == 74880
    assert not [key for key in summary if key.startswith("activation_swap")]
    assert not callback.swap.active
    assert hooks(model) == 0


def test_mode_none_logs_nothing(tmp_path: Path) -> None:
    _, history = train(tmp_path, ActivationSwapCallback("none"))
    assert not [key for log in history for key in log if key.startswith("activation_swap")]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"torch_compile": True}, Reason.COMPILE_REQUESTED),
        ({"gradient_checkpointing": True}, Reason.CHECKPOINT_REQUESTED),
        ({"fsdp_config": {"activation_checkpointing": True}}, Reason.CHECKPOINT_REQUESTED),
        ({"deepspeed": "zero3.json"}, Reason.OTHER_BACKEND),
    ],
)
def test_arguments_that_do_not_go_with_a_swap(values: dict[str, Any], reason: Reason) -> None:
    model = tiny_model()
    with pytest.raises(ActivationSwapError) as caught:
        ActivationSwapCallback().on_train_begin(
            training_arguments(**values), None, None, model=model
        )
    assert caught.value.reason is reason
    assert hooks(model) == 0


def test_training_again_applies_again(tmp_path: Path) -> None:
    callback = ActivationSwapCallback(policy=SwapPolicy(min_bytes=1))
    for _ in range(2):
        _, history = train(tmp_path, callback)
        assert history[0]["activation_swap/saved_bytes"] > 0


def test_the_commands_do_not_import_the_callback() -> None:
    script = (
        "import sys, activation_swap.trainer; "
        "sys.exit('transformers' in sys.modules or 'accelerate' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_package_of_the_callback_has_no_other_name() -> None:
    import activation_swap.trainer

    with pytest.raises(AttributeError, match="Callback2"):
        _ = activation_swap.trainer.Callback2
