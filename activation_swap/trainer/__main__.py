# SPDX-License-Identifier: Apache-2.0
"""The command line: one row per command, each command a module that is imported when called."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from activation_swap import __version__
from activation_swap.errors import ActivationSwapError, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command.

    Attributes:
        module: Module with ``add_arguments(parser)`` and ``run(arguments) -> int``.
        summary: One line for ``--help``.
    """

    module: str
    summary: str


COMMANDS = {
    "check": Command(
        module="activation_swap.trainer.check",
        summary="tell whether the swap would work on this machine",
    ),
    "train": Command(
        module="activation_swap.trainer.train",
        summary="train a model as a YAML file says",
    ),
    "compare": Command(
        module="activation_swap.trainer.compare",
        summary="run with and without the swap; compare bits, memory and time",
    ),
    "plan": Command(
        module="activation_swap.trainer.plan",
        summary="predict what a pipeline would gain, rank by rank",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code: 0 done, 1 done with a negative result, 2 refused.
    """
    parser = argparse.ArgumentParser(prog="activation-swap", description=_description())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    chosen = parser.parse_args(argv)
    command = COMMANDS[chosen.command]
    try:
        module = _load(chosen.command)
        own = argparse.ArgumentParser(
            prog=f"activation-swap {chosen.command}", description=command.summary
        )
        module.add_arguments(own)
        code: int = module.run(own.parse_args(chosen.arguments))
    except ActivationSwapError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return code


def _description() -> str:
    rows = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return f"Train Qwen3-MoE with its attention activations in host memory.\n\ncommands:\n{rows}"


def _load(name: str) -> Any:
    try:
        return import_module(COMMANDS[name].module)
    except ImportError as error:  # not there, or older than what is imported of it
        if error.name is None or error.name.startswith("activation_swap"):
            raise
        raise Reason.TRAINER_EXTRA_MISSING.error(found=str(error), where=name) from error


if __name__ == "__main__":
    sys.exit(main())
