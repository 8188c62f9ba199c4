from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_worker.driver import checkpoints
from rljob_worker.driver.checkpoints import CheckpointStore, DriverState
from rljob_worker.errors import UserError


class Killed(BaseException):
    """The process ends here."""


def state(step: int, attempt: int = 1) -> DriverState:
    return DriverState(step, step, {"row": step}, attempt, 2)


def save(store: CheckpointStore, step: int, attempt: int = 1) -> None:
    folder = store.begin(step)
    for rank in range(2):
        (folder / f"rank-{rank}").write_text(f"{step} {attempt} {rank}")
    store.commit(folder, state(step, attempt))


def content(store: CheckpointStore) -> dict[int, int]:
    """Step -> attempt of all complete checkpoints, each checked to be whole."""
    found = {}
    for step in store.complete_steps():
        read = store.read(step)
        files = [(store.folder(step) / f"rank-{rank}").read_text() for rank in range(2)]
        assert files == [f"{step} {read.attempt} {rank}" for rank in range(2)]
        assert read == state(step, read.attempt)
        found[step] = read.attempt
    return found


def test_the_newest_is_found_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a" / "b", keep=2)
    assert (store.complete_steps(), store.latest()) == ([], None)
    for step in (2, 9, 10):
        save(store, step)
    assert content(store) == {9: 1, 10: 1}
    assert store.latest() == state(10)
    assert sorted(entry.name for entry in store.root.iterdir()) == ["step-10", "step-9"]


def test_what_is_not_complete_is_not_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    for name in ("step-7", "step-8.incomplete", "step-007", "step-x", "other"):
        (tmp_path / name).mkdir()
    for name in ("step-8.incomplete", "step-007", "other"):
        (tmp_path / name / "driver.json").write_text("{}")
    assert store.complete_steps() == [1]
    with pytest.raises(UserError, match="no complete checkpoint of step 7; complete ones: 1"):
        store.read(7)
    store.begin(9)
    assert not (tmp_path / "step-8.incomplete").exists()


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"step": 1, "stranger": 2}'])
def test_a_damaged_driver_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "driver.json").write_text(text)
    with pytest.raises(UserError, match=r"step-1/driver\.json: not the state of a driver"):
        CheckpointStore(tmp_path, keep=1).latest()


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Make the process end instead of its `number`th change of a file or folder; returns how many there were."""
    count = 0

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, change)

    def delete(folder: Path) -> None:
        """As shutil.rmtree, in an order that is bad for readers: the file that marks a folder complete goes last."""
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "driver.json"):
            os.unlink(path)
        os.rmdir(folder)

    monkeypatch.setattr(shutil, "rmtree", delete)
    for name in ("rename", "mkdir", "write_text"):
        wrap(Path, name)
    for name in ("fsync", "unlink", "rmdir"):
        wrap(os, name)
    wrap(json, "dump")
    return lambda: count


@pytest.mark.parametrize("saved", [(7, 2), (6, 2)], ids=["a new step", "a step that has a checkpoint"])
def test_a_kill_at_any_instant_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, saved: tuple[int, int]) -> None:
    step, attempt = saved
    outcomes = set()
    for number in range(1, 1000):
        root = tmp_path / str(number)
        store = CheckpointStore(root, keep=2)
        for old in (5, 6):
            save(store, old)
        with pytest.MonkeyPatch.context() as patch:
            died = die_at(patch, number)
            with contextlib.suppress(Killed):
                save(store, step, attempt)
            finished = died() < number
        found = content(CheckpointStore(root, keep=2))
        old_or_new = {1, attempt} if step == 6 else {None, attempt}
        assert found.get(step) in old_or_new, f"killed at change {number}: {found}"
        assert found.get(6) in (1, attempt), f"killed at change {number}: the checkpoint before is lost: {found}"
        outcomes.add(found.get(step))

        # Whatever was left behind, the next attempt goes on from there.
        again = CheckpointStore(root, keep=2)
        save(again, 8, 3)
        assert max(content(again)) == 8
        assert content(again).keys() <= {5, 6, 7, 8}
        assert len(content(again)) == 2
        assert all(entry.name.count(".") == 0 for entry in root.iterdir())
        if finished:
            break
    assert number > 10
    assert outcomes == old_or_new


def test_files_are_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    store = CheckpointStore(tmp_path, keep=1)
    folder = store.begin(1)
    real_sync, real_rename = checkpoints._sync_folder, Path.rename
    monkeypatch.setattr(checkpoints, "_sync_folder", lambda f: (happened.append(f"sync {f.name}"), real_sync(f)))
    monkeypatch.setattr(Path, "rename", lambda s, t: (happened.append(f"rename {t.name}"), real_rename(s, t))[1])
    store.commit(folder, state(1))
    assert happened == ["sync step-1.incomplete", "rename step-1", f"sync {tmp_path.name}"]
