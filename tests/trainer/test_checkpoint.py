# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is complete and visible, or not there, whatever call a crash follows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from activation_swap.errors import Reason, RejectedError
from activation_swap.trainer.checkpoint import (
    CheckpointStore,
    RunState,
    read_state,
    restore_checkpoint,
    write_checkpoint,
)
from activation_swap.trainer.config import AdamWSection
from activation_swap.trainer.optimizer import AdamW
from activation_swap.trainer.stream import Position

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
STATE = RunState(
    step=3, position=Position(document=1, offset=2), corpus="abc", trajectory={"seed": 0}
)


class CrashError(BaseException):
    """The process ends here: nothing in the package may catch it."""


def content(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "one").write_text(text)
        (directory / "two").write_text(text)

    return write


def visible(store: CheckpointStore) -> list[tuple[str, str, str]]:
    return [
        (path.name, (path / "one").read_text(), (path / "two").read_text())
        for path in store.complete()
    ]


def crash_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Crash before the given call into the file system, and half-way in a deletion."""
    count = 0

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                raise CrashError
            return function(*args, **kwargs)

        return guarded

    def halting_rmtree(path: Path) -> None:
        for file in sorted(path.iterdir()):
            guard(os.unlink)(file)
        guard(os.rmdir)(path)

    for owner, name in (
        (Path, "mkdir"),
        (Path, "write_text"),
        (Path, "rename"),
        (os, "fsync"),
    ):
        monkeypatch.setattr(owner, name, guard(getattr(owner, name)))
    monkeypatch.setattr(shutil, "rmtree", halting_rmtree)


@pytest.mark.parametrize("keep", [1, 2])
def test_crash_before_any_call_leaves_complete_checkpoints_only(keep: int, tmp_path: Path) -> None:
    crashes = 0
    while True:
        store = CheckpointStore(tmp_path / f"run{crashes}", keep=keep)
        store.save(1, content("first"))
        store.save(2, content("second"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_at(monkeypatch, crashes + 1)
            try:
                store.save(3, content("third"))
            except CrashError:
                crashed = True
            else:
                crashed = False
        texts = {name: (one, two) for name, one, two in visible(store)}
        newest = max(texts)
        assert newest in {"step-00000002", "step-00000003"}
        assert texts[newest] == (("third",) * 2 if newest.endswith("3") else ("second",) * 2)
        assert all(one == two for one, two in texts.values())
        if not crashed:
            break
        crashes += 1
        # The next save goes through and leaves nothing of the crash.
        store.save(4, content("fourth"))
        assert len(store.complete()) == keep
        assert {path.name for path in (tmp_path / f"run{crashes - 1}").iterdir()} == {
            path.name for path in store.complete()
        }
    # mkdir x2, write x2, fsync x4, rename, and at least rename, unlink x2, rmdir of the oldest.
    assert crashes >= 13


def test_newest_is_forced_to_the_disk_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def logged_sync(descriptor: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').resolve().name}")
        sync(descriptor)

    def logged_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    CheckpointStore(tmp_path / "run", keep=1).save(1, content("x"))
    assert set(events[:2]) == {"fsync one", "fsync two"}
    assert events[2:] == [
        "fsync .step-00000001.unfinished",
        "rename step-00000001",
        "fsync run",
    ]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (9, 10, 100_000_000, 100_000_001):
        store.save(step, content(str(step)))
    assert [path.name for path in store.complete()] == ["step-100000000", "step-100000001"]


def test_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", keep=1).complete() == []


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, content("x"))
    assert [path.name for path in store.complete()] == ["step-00000001"]
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step-1").exists()


def trained() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.tied = model.weight
    optimizer = AdamW(model, AdamWSection())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(directory: Path, device: torch.device = CPU) -> tuple[nn.Module, AdamW]:
    model, optimizer = trained()
    directory.mkdir(exist_ok=True)
    write_checkpoint(directory, model=model, optimizer=optimizer, device=device, state=STATE)
    return model, optimizer


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path / "one")
    expected = torch.rand(3)
    other, other_optimizer = trained()
    with torch.no_grad():
        other.get_parameter("weight").zero_()
    restore_checkpoint(tmp_path / "one", model=other, optimizer=other_optimizer, device=CPU)
    assert torch.equal(torch.rand(3), expected)
    assert read_state(tmp_path / "one") == STATE
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    states = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys() == {0, 1}
    for index, moments in states[0].items():
        for name, tensor in moments.items():
            assert torch.equal(states[1][index][name], tensor)


def test_generator_is_of_the_device_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the current one: nothing makes ``cuda:1`` current."""
    states = {f"cuda:{index}": torch.tensor([index], dtype=torch.uint8) for index in range(3)}
    cuda = SimpleNamespace(
        get_rng_state=lambda device: states[str(device)],
        set_rng_state=lambda state, device: states.update({str(device): state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    model, optimizer = saved(tmp_path, torch.device("cuda:1"))
    restore_checkpoint(tmp_path, model=model, optimizer=optimizer, device=torch.device("cuda:2"))
    assert [int(state) for state in states.values()] == [0, 1, 1]
    restore_checkpoint(tmp_path, model=model, optimizer=optimizer, device=CPU)


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("how", ["missing", "empty", "half"])
@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.pt"])
def test_damage_is_named(name: str, how: str, tmp_path: Path) -> None:
    directory = tmp_path / "one"
    model, optimizer = saved(directory)
    damage(directory / name, how)

    def resume() -> None:
        read_state(directory)
        restore_checkpoint(directory, model=model, optimizer=optimizer, device=CPU)

    with pytest.raises(RejectedError) as caught:
        resume()
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT
    assert caught.value.where == str(directory)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 2}', '{"format": 1, "step": 1}'])
def test_foreign_state_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(RejectedError) as caught:
        read_state(tmp_path)
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT


def test_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    _, optimizer = saved(tmp_path)
    with pytest.raises(RejectedError, match="state_dict for Linear"):
        restore_checkpoint(tmp_path, model=nn.Linear(5, 4), optimizer=optimizer, device=CPU)
