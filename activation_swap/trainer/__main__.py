# SPDX-License-Identifier: Apache-2.0
"""The command line: one row per command, each command a module that is imported when called."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from activation_swap import __version__
from activation_swap.errors import (
    ActivationSwapError,
    Reason,
    RejectedError,
    UnsupportedBackendError,
)
from activation_swap.trainer.broke_off import broke_off

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["COMMANDS", "Command", "Exit", "main"]


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


class Exit(IntEnum):
    """Exit codes of the commands."""

    SUCCESS = 0
    NEGATIVE = 1
    """The command did its work, and the result is negative."""
    REFUSED = 2
    FAILED = 3
    """The command could not do its work, or has a defect."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: as with Ctrl-C, what was begun is to be ended on the way out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code: one of :class:`Exit`, or 128 and the number of the signal that ended it.
    """
    parser = argparse.ArgumentParser(prog="activation-swap", description=_description())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    chosen = parser.parse_args(argv)
    try:
        with _termination_raised():
            code = _run(chosen.command, chosen.arguments)
            sys.stdout.flush()
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
        _tell(f"stopped by {number.name}", stop)
        return 128 + number
    except SystemExit as stop:
        # argparse's, or rich's when nobody reads the output any more.
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        return _failed(stop.__context__)
    except Exception as error:  # noqa: BLE001 - here it ends: a code and a message for each
        return _failed(error)
    return code


def _run(name: str, arguments: Sequence[str]) -> int:
    module = _load(name)
    parser = argparse.ArgumentParser(
        prog=f"activation-swap {name}", description=COMMANDS[name].summary
    )
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(arguments))
    return code


@contextmanager
def _termination_raised() -> Iterator[None]:
    """Raise where SIGTERM would end the process, children and all that it has begun left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(error: Exception) -> int:
    """Tell what went wrong, and return the exit code."""
    if isinstance(error, ActivationSwapError):
        _tell(str(error), error)
        refused = isinstance(error, RejectedError | UnsupportedBackendError)
        return Exit.REFUSED if refused else Exit.FAILED
    if isinstance(error, OSError) or _ran_out_of_memory(error):
        where = getattr(error, "filename", None)
        if isinstance(error, OSError) and where is None:
            _leave_output()
        _tell(str(broke_off(error, where=where)), error)
    else:
        _tell("".join(traceback.format_exception(error)).rstrip())
    return Exit.FAILED


def _tell(text: str, error: BaseException | None = None) -> None:
    with suppress(OSError):
        sys.stderr.write("\n".join([text, *getattr(error, "__notes__", ())]) + "\n")


def _leave_output() -> None:
    """Drop what standard output did not take: Python would try again at its exit, and complain."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _ran_out_of_memory(error: Exception) -> bool:
    # Imports torch, so only where it can be the reason.
    if not isinstance(error, RuntimeError | MemoryError):
        return False
    module: Any = import_module("activation_swap.trainer.device")
    found: bool = module.ran_out_of_memory(error)
    return found


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
