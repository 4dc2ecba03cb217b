# SPDX-License-Identifier: Apache-2.0
"""A call in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from activation_swap.trainer.broke_off import broke_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

__all__ = ["in_own_process"]

P = ParamSpec("P")
T = TypeVar("T")


class _Remote(Exception):  # noqa: N818 - never raised: it shows in a traceback
    """The traceback of another process."""


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in a fresh process: no memory, stream or cache of it is left for the next.

    The process ends before this returns or raises, and when this process is killed.

    Args:
        function: Of a module, so that the process can import it.
        args: Of the function; like its result and its exceptions they can be pickled.
        kwargs: Likewise.

    Returns:
        What the function returned.

    Raises:
        Exception: What the function raised, with the process's traceback as its cause.
        SwapStateError: AS417 when the process ended without a result.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args, kwargs))
    with _interrupts_ignored():
        process.start()
    sender.close()
    try:
        result, error, remote = receiver.recv()
    except EOFError:
        process.join()
        found = f"exit code {process.exitcode}, and no result"
        raise broke_off(found, where=f"process of {function.__name__}") from None
    finally:
        process.terminate()
        process.join()
        receiver.close()
    if error is not None:
        raise error from _Remote(remote)
    value: T = result
    return value


def _answer(
    sender: Connection,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = function(*args, **kwargs), None, ""
    except Exception as error:  # noqa: BLE001 - the parent raises it
        sender.send((None, error, traceback.format_exc()))
    else:
        sender.send(answer)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let a process that starts here ignore Ctrl-C: its parent gets it too, and ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
