# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a crash cannot spoil: complete and visible, or not there.

A checkpoint is written into a hidden sibling directory, forced to the disk and then renamed; a
rename is atomic. Old checkpoints leave the same way: renamed first, deleted afterwards. So a
directory ``step-N`` is complete at every moment, and there is one from the first save on.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from activation_swap.errors import Reason
from activation_swap.trainer.broke_off import broke_off
from activation_swap.trainer.disk import sync, writing
from activation_swap.trainer.stream import Position  # noqa: TC001 - pydantic evaluates it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from activation_swap.trainer.optimizer import Optimizer

__all__ = [
    "CheckpointStore",
    "RunState",
    "read_state",
    "reading_checkpoint",
    "restore_checkpoint",
    "write_checkpoint",
]

_NAME = re.compile(r"step-[0-9]{8,}")
_LEFT_BEHIND = re.compile(rf"\.{_NAME.pattern}\.(unfinished|deleted)")
_WEIGHTS, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands, apart from weights, optimizer and random generators.

    Attributes:
        step: Steps done.
        position: Where the next tokens come from.
        corpus: ``Corpus.digest``.
        trajectory: ``Config.trajectory()``.
        format: Which version of a checkpoint's files this is.
    """

    step: Annotated[int, Field(ge=1)]
    position: Position
    corpus: str
    trajectory: dict[str, Any]
    format: Literal[1] = 1


class CheckpointStore:
    """The checkpoints below one directory. One process writes at a time."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        found = [
            path
            for path in self._directory.iterdir()
            if _NAME.fullmatch(path.name) and path.is_dir()
        ]
        return sorted(found, key=_step)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Add one checkpoint, then delete those beyond the number to keep.

        Args:
            step: Steps done; higher than that of every checkpoint here.
            write: Writes files into the empty directory that it is given.

        Returns:
            The directory of the checkpoint.

        Raises:
            SwapStateError: AS417 when it cannot be written, or is not the newest.
        """
        final = self._directory / _name(step)
        newest = self.complete()[-1:]
        if newest and _step(newest[0]) >= step:
            found = f"{newest[0].name}, which is not older"
            raise broke_off(found, where=final)
        with writing(final):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            unfinished = self._directory / f".{final.name}.unfinished"
            unfinished.mkdir()
            write(unfinished)
            for path in unfinished.iterdir():
                sync(path)
            sync(unfinished)
            unfinished.rename(final)
            sync(self._directory)
            for path in self.complete()[: -self._keep]:
                path.rename(path.with_name(f".{path.name}.deleted"))
            self._sweep()
        return final

    @contextmanager
    def naming_newest(self) -> Iterator[None]:
        """Add to whatever ends the block early which checkpoint there is to go on from."""
        try:
            yield
        except BaseException as error:
            for path in self.complete()[-1:]:
                error.add_note(f"newest checkpoint: {path}; --resume goes on from it")
            raise

    def _sweep(self) -> None:
        """Delete what a crash, or the save before it, left behind."""
        for path in self._directory.glob(".step-*"):
            if not _LEFT_BEHIND.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def write_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    state: RunState,
) -> None:
    """Write everything that decides the rest of the run into an empty directory.

    Args:
        directory: Where to.
        model: Gives the weights.
        optimizer: Gives its state.
        device: Gives the state of its random generator, beside that of the CPU.
        state: The rest.

    Raises:
        OSError: A file cannot be written; as SafetensorError for the weights.
    """
    (directory / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", "utf-8")
    rest = {"optimizer": optimizer.state_dict(), "generators": _generators(device)}
    try:
        torch.save(rest, directory / _OPTIMIZER)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(str(error)) from error
    save_model(model, str(directory / _WEIGHTS))
    # safetensors lets nobody but the owner read its file.
    shutil.copymode(directory / _STATE, directory / _WEIGHTS)


def read_state(directory: Path) -> RunState:
    """Return where the run of a checkpoint stands.

    Args:
        directory: A checkpoint of a :class:`CheckpointStore`.

    Raises:
        RejectedError: AS409 when the state is missing, cut off, of another format, or of another
            step than the name of the directory says.
    """
    with reading_checkpoint(directory):
        state = _read(directory / _STATE)
        if directory.name != _name(state.step):
            msg = f"{_STATE} of step {state.step} in {directory.name}"
            raise ValueError(msg)
        return state


def restore_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: Optimizer, device: torch.device
) -> None:
    """Restore weights, optimizer and random generators.

    Reads safetensors and ``weights_only`` data: no code of a checkpoint is executed.

    Args:
        directory: A checkpoint of a :class:`CheckpointStore`.
        model: Gets the weights, in place.
        optimizer: Gets its state.
        device: Gets the state of its random generator, if the checkpoint is of such a device.

    Raises:
        RejectedError: AS409 when a file is missing, cut off or not of this model.
    """
    with reading_checkpoint(directory):
        load_model(model, str(directory / _WEIGHTS))
        rest = torch.load(directory / _OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(rest["optimizer"])
        _restore_generators(rest["generators"], device)


@contextmanager
def reading_checkpoint(directory: Path) -> Iterator[None]:
    """Turn what damaged files raise inside of the block into AS409.

    Args:
        directory: The checkpoint that the block reads.

    Raises:
        RejectedError: AS409.
    """
    try:
        yield
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        SafetensorError,
        pickle.UnpicklingError,
    ) as error:
        raise Reason.DAMAGED_CHECKPOINT.error(
            found=f"{type(error).__name__}: {error}", where=str(directory)
        ) from error


def _read(path: Path) -> RunState:
    try:
        return TypeAdapter(RunState).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        parts = (
            f"{'.'.join(map(str, detail['loc'])) or 'all'}: {detail['msg']}"
            for detail in error.errors()
        )
        msg = f"{path.name}: {'; '.join(parts)}"
        raise ValueError(msg) from error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore_generators(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
