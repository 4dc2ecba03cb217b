# SPDX-License-Identifier: Apache-2.0
"""The directory of everything that a run writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from activation_swap.errors import Reason
from activation_swap.trainer.checkpoint import CheckpointStore
from activation_swap.trainer.metrics import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OutputDirectory"]


class OutputDirectory:
    """Makes the directory before the model is built: a run of hours has somewhere to write.

    Args:
        path: The directory.

    Attributes:
        checkpoints: Directory of the checkpoints.
        metrics: The metrics file.

    Raises:
        RejectedError: AS415 when it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Reason.OUTPUT_UNWRITABLE.error(
                found=f"{type(error).__name__}: {error}", where="output"
            ) from error

    def refuse_earlier_run(self) -> None:
        """Refuse to begin a run where the results of another one are.

        Raises:
            RejectedError: AS408 when there is a checkpoint or a step in the metrics.
        """
        checkpoints = CheckpointStore(self.checkpoints, keep=1).complete()
        steps = sum(1 for _ in read_metrics(self.metrics))
        if checkpoints or steps:
            raise Reason.EARLIER_RUN_IN_THE_WAY.error(
                found=f"{len(checkpoints)} checkpoints, metrics of {steps} steps",
                where=str(self._path),
            )
