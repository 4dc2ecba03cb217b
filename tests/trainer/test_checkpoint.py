# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is complete and visible, or not there, whatever call a crash follows."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from activation_swap.errors import Reason, RejectedError, SwapStateError
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
    directory = tmp_path / "step-00000003"
    model, optimizer = saved(directory)
    expected = torch.rand(3)
    other, other_optimizer = trained()
    with torch.no_grad():
        other.get_parameter("weight").zero_()
    restore_checkpoint(directory, model=other, optimizer=other_optimizer, device=CPU)
    assert torch.equal(torch.rand(3), expected)
    assert read_state(directory) == STATE
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
    directory = tmp_path / "step-00000003"
    model, optimizer = saved(directory)
    damage(directory / name, how)

    def resume() -> None:
        read_state(directory)
        restore_checkpoint(directory, model=model, optimizer=optimizer, device=CPU)

    with pytest.raises(RejectedError) as caught:
        resume()
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT
    assert caught.value.where == str(directory)


def with_state(tmp_path: Path, **changes: Any) -> Path:
    """Make a directory with the state of step 3, and with these values in place of its own."""
    directory = tmp_path / "step-00000003"
    directory.mkdir()
    (directory / "state.json").write_text(json.dumps(asdict(STATE) | changes))
    return directory


def refused_state(directory: Path) -> str:
    with pytest.raises(RejectedError) as caught:
        read_state(directory)
    assert caught.value.reason is Reason.DAMAGED_CHECKPOINT
    return caught.value.found


def test_state_as_it_was_written_is_read(tmp_path: Path) -> None:
    """The tests below could fail."""
    assert read_state(with_state(tmp_path)) == STATE


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 2}', '{"format": 1, "step": 1}', "\0"])
def test_foreign_state_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    assert "state.json" in refused_state(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"step": 3.0},
        {"step": "3"},
        {"step": True},
        {"step": float("inf")},
        {"step": -5},
        {"step": 0},
        {"position": {"document": 1, "offset": 1.5}},
        {"position": {"document": -1, "offset": 0}},
        {"position": {"document": 1, "offset": None}},
        {"position": []},
        {"corpus": 5},
        {"trajectory": None},
    ],
    ids=str,
)
def test_value_that_no_run_wrote_is_rejected(changes: dict[str, Any], tmp_path: Path) -> None:
    found = refused_state(with_state(tmp_path, **changes))
    assert f"state.json: {next(iter(changes))}" in found


def test_state_of_another_step_than_the_name_says_is_rejected(tmp_path: Path) -> None:
    directory = with_state(tmp_path).rename(tmp_path / "step-00000100")
    assert refused_state(directory) == "ValueError: state.json of step 3 in step-00000100"


def test_older_step_than_a_checkpoint_is_not_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(100, content("x"))
    for step in (3, 100):
        with pytest.raises(SwapStateError, match="step-00000100, which is not older"):
            store.save(step, content("y"))
    assert visible(store) == [("step-00000100", "x", "x")]


def test_what_is_not_the_trainers_is_not_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".step-junk").touch()
    (tmp_path / ".step-mine").mkdir()
    (tmp_path / "step-00000009").touch()
    (tmp_path / ".step-00000001.unfinished").touch()
    CheckpointStore(tmp_path, keep=1).save(1, content("x"))
    assert {path.name for path in tmp_path.iterdir()} == {
        ".step-junk",
        ".step-mine",
        "step-00000009",
        "step-00000001",
    }


def test_files_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "one").iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()

    def save() -> None:
        CheckpointStore(tmp_path, keep=1).save(
            3,
            lambda at: write_checkpoint(
                at, model=model, optimizer=optimizer, device=CPU, state=STATE
            ),
        )

    # A device that is always full takes the place of each file in turn.
    mkdir = Path.mkdir
    for name in ("state.json", "optimizer.pt"):

        def full(path: Path, name: str = name, **kwargs: Any) -> None:
            mkdir(path, **kwargs)
            if path.suffix == ".unfinished":
                (path / name).symlink_to("/dev/full")

        monkeypatch.setattr(Path, "mkdir", full)
        with pytest.raises(SwapStateError) as caught:
            save()
        assert caught.value.reason is Reason.RUN_BROKE_OFF
        assert CheckpointStore(tmp_path, keep=1).complete() == []
    monkeypatch.undo()
    save()
    assert len(CheckpointStore(tmp_path, keep=1).complete()) == 1


def test_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    _, optimizer = saved(tmp_path)
    with pytest.raises(RejectedError, match="state_dict for Linear"):
        restore_checkpoint(tmp_path, model=nn.Linear(5, 4), optimizer=optimizer, device=CPU)
