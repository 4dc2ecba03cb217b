# SPDX-License-Identifier: Apache-2.0
"""The command ``activation-swap train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from activation_swap.errors import Reason
from activation_swap.trainer.config import load_config
from activation_swap.trainer.loop import train
from activation_swap.trainer.pipeline import train_pipeline
from activation_swap.trainer.ranks import refuse_ranks

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="replace a value of the file, for example model.dtype=bfloat16",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit code.

    Raises:
        RejectedError: AS412 when torchrun started several processes of a run that is none of a
            pipeline, AS413 when a pipelined run is to resume; and what the run itself refuses.
    """
    config = load_config(arguments.config, arguments.overrides)
    if config.pp_size > 1:
        if arguments.resume:
            raise Reason.RESUME_UNDER_PIPELINE.error(
                where=str(arguments.config), found=f"--resume with pp_size: {config.pp_size}"
            )
        train_pipeline(config)
    else:
        refuse_ranks()
        train(config, resume=arguments.resume)
    return 0
