from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import commit, lone_store

from rljob_api.wire.values import WireError
from rljob_worker.checkpoints import store as checkpoint_store
from rljob_worker.checkpoints.reader import Checkpoints, PassedOver, damage_of_files
from rljob_worker.checkpoints.state import DriverState, UnverifiedError
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.errors import JobError, UserError
from rljob_worker.trainer.checked_file import CheckedFile


class Killed(BaseException):
    """The process ends here."""


def state(step: int, attempt: int = 1) -> DriverState:
    return DriverState(step, step, {"row": step}, attempt, 2)


def save(store: CheckpointStore, step: int, attempt: int = 1) -> None:
    commit(store, state(step, attempt), f"{step} {attempt}")


def content(store: Checkpoints) -> dict[int, int]:
    """Step -> attempt of all complete checkpoints, each checked to be whole."""
    found = {}
    for step in store.complete_steps():
        read = store.read(step)
        files = [(store.folder(step) / f"rank-{rank}").read_text() for rank in range(2)]
        assert files == [f"{step} {read.attempt} {rank}" for rank in range(2)]
        assert replace(read, files=None) == state(step, read.attempt)
        found[step] = read.attempt
    return found


def test_the_newest_is_found_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    store = lone_store(tmp_path / "a" / "b", keep=2)
    assert (store.complete_steps(), store.latest()) == ([], None)
    for step in (2, 9, 10):
        save(store, step)
    assert content(store) == {9: 1, 10: 1}
    newest = store.latest()
    assert newest is not None
    assert (newest.step, newest.data_cursor) == (10, {"row": 10})
    assert sorted(entry.name for entry in store.root.iterdir()) == ["step-10", "step-9"]


def test_the_best_is_kept_however_old_it_is(tmp_path: Path) -> None:
    values: dict[int, float] = {}

    def best(steps: Collection[int]) -> int | None:
        return max((step for step in steps if step in values), key=values.__getitem__, default=None)

    store = CheckpointStore(tmp_path, 1, 1, lambda: None, best)
    there = []
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 1.0), (6, 0.4)):
        save(store, step)
        there.append(store.complete_steps())
        values[step] = value
    # What is not measured yet is kept for being the newest.
    assert there == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [5, 6]]
    assert content(store) == {5: 1, 6: 1}


def test_what_is_not_complete_is_not_there(tmp_path: Path) -> None:
    store = lone_store(tmp_path, keep=3)
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


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "\xff", '{"step": 1, "stranger": 2}', "[" * 100000])
def test_a_damaged_driver_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "driver.json").write_text(text)
    with pytest.raises(JobError, match=r"step-1/driver\.json: not the state of a driver"):
        Checkpoints(tmp_path, trust_unverified=True).latest()


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
        """Same as shutil.rmtree, in an order that is bad for readers: the file that marks a folder complete goes
        last."""
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "driver.json"):
            os.unlink(path)
        os.rmdir(folder)

    monkeypatch.setattr(shutil, "rmtree", delete)
    for name in ("rename", "replace", "mkdir", "write_text"):
        wrap(Path, name)
    for name in ("fsync", "unlink", "rmdir"):
        wrap(os, name)
    return lambda: count


@pytest.mark.parametrize("saved", [(7, 2), (6, 2)], ids=["a new step", "a step that has a checkpoint"])
def test_a_kill_at_any_instant_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, saved: tuple[int, int]) -> None:
    step, attempt = saved
    outcomes = set()
    for number in range(1, 1000):
        root = tmp_path / str(number)
        store = lone_store(root, keep=2)
        for old in (5, 6):
            save(store, old)
        with pytest.MonkeyPatch.context() as patch:
            died = die_at(patch, number)
            with contextlib.suppress(Killed):
                save(store, step, attempt)
            finished = died() < number
        found = content(Checkpoints(root))
        old_or_new = {1, attempt} if step == 6 else {None, attempt}
        assert found.get(step) in old_or_new, f"killed at change {number}: {found}"
        assert found.get(6) in (1, attempt), f"killed at change {number}: the checkpoint before is lost: {found}"
        outcomes.add(found.get(step))

        # Whatever was left behind, the next attempt goes on from there.
        again = lone_store(root, keep=2, epoch=3)
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
    store = lone_store(tmp_path, keep=1)
    folder = store.begin(1)
    real_sync, real_rename = checkpoint_store.sync_folder, Path.rename
    monkeypatch.setattr(checkpoint_store, "sync_folder", lambda f: (happened.append(f"sync {f.name}"), real_sync(f)))
    monkeypatch.setattr(Path, "rename", lambda s, t: (happened.append(f"rename {t.name}"), real_rename(s, t))[1])
    store.commit(folder, state(1))
    assert happened == ["sync step-1.a1.incomplete", "rename step-1", f"sync {tmp_path.name}"]


def spoil(folder: Path, how: str) -> None:
    file, meta, seal = folder / "rank-1", folder / "driver.json", folder / "driver.json.xxh3"
    said = json.loads(meta.read_text())
    texts = {
        "empty": "",
        "torn": meta.read_text()[:-20],
        "stranger": "[1]",
        "another step": json.dumps({**said, "step": 77}),
        "no files": json.dumps({**said, "files": []}),
        "another position": meta.read_text().replace('"row": ', '"row": 1'),
    }
    if how == "bit flip":
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    elif how == "truncation":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "missing":
        file.unlink()
    elif how in texts:
        meta.write_text(texts[how])
    elif how == "no checksum":
        seal.write_text("")
    elif how == "checksum of another":
        shutil.copy(folder.with_name("step-1") / seal.name, seal)
    else:
        kind, name = how.split(" for ")
        put(folder / name, kind)


def put(path: Path, kind: str) -> None:
    """Something else in the place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            here = os.getcwd()
            os.chdir(path.parent)
            one.bind(path.name)
            os.chdir(here)
    else:
        path.symlink_to({"zeros": "/dev/zero", "loop": path.name, "dead link": "nowhere"}[kind])


HOWS = [
    *("bit flip", "truncation", "missing", "empty", "torn"),
    *("stranger", "another step", "no files", "another position", "no checksum", "checksum of another"),
    *(
        f"{kind} for {name}"
        for kind in ("pipe", "zeros", "loop", "dead link", "folder", "socket", "large")
        for name in ("rank-1", "driver.json", "driver.json.xxh3")
    ),
]


@pytest.mark.parametrize("how", HOWS)
def test_damaged_ones_are_set_aside_by_name_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    store = lone_store(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step)
    for step in (2, 3):
        spoil(tmp_path / f"step-{step}", how)
    told: list[tuple[str, str]] = []

    def tell(folder: Path, passed: PassedOver) -> None:
        told.append((folder.name, passed.reason))

    found = store.newest_whole(damage_of_files, tell)
    assert found is not None
    assert (found.state.step, found.folder.name, found.verified) == (1, "step-1", True)
    assert [name for name, _ in told] == ["step-3.damaged", "step-2.damaged"]
    assert all("step-3/" in reason or "step-2/" in reason for _, reason in told)
    assert store.complete_steps() == [1]
    save(store, 3)
    spoil(tmp_path / "step-3", how)
    again = lone_store(tmp_path, keep=3, epoch=2)
    reread = again.newest_whole(damage_of_files, tell)
    assert reread is not None
    assert reread.state == found.state
    assert told[-1][0] == "step-3.damaged-2"


def test_the_one_that_was_to_be_replaced_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    store = lone_store(tmp_path, keep=3)
    save(store, 1)
    save(store, 2, attempt=1)
    (tmp_path / "step-2").rename(tmp_path / "step-2.replaced")
    save(lone_store(tmp_path / "elsewhere", keep=3), 2, attempt=2)
    (tmp_path / "elsewhere" / "step-2").rename(tmp_path / "step-2")
    spoil(tmp_path / "step-2", "bit flip")
    told: list[str] = []
    found = store.newest_whole(damage_of_files, lambda folder, _: told.append(folder.name))
    assert found is not None
    assert (found.folder.name, found.state.attempt, told) == ("step-2.replaced", 1, ["step-2.damaged"])
    save(store, 3)
    assert content(store) == {1: 1, 2: 1, 3: 1}
    (tmp_path / "step-3").rename(tmp_path / "step-3.replaced")
    spoil(tmp_path / "step-3.replaced", "another position")
    found = store.newest_whole(damage_of_files, lambda folder, _: told.append(folder.name))
    assert found is not None
    assert (found.state.step, told[1:]) == (2, ["step-3.damaged"])


def test_without_a_whole_one_nothing_is_moved_and_each_is_named(tmp_path: Path) -> None:
    store = lone_store(tmp_path, keep=3)
    assert store.newest_whole(damage_of_files, lambda *_: None) is None
    for step in (1, 2, 3):
        save(store, step)
    for step in (1, 2):
        spoil(tmp_path / f"step-{step}", "bit flip")
    (tmp_path / "step-3" / "driver.json.xxh3").unlink()
    with pytest.raises(JobError, match=r"no checkpoint is as it was written") as caught:
        store.newest_whole(damage_of_files, lambda *_: None)
    for wanted in ("step-1/rank-1", "step-2/rank-1", "step-3: has no driver.json.xxh3", "--trust-unverified"):
        assert wanted in str(caught.value)
    assert store.complete_steps() == [1, 2, 3]


def as_before_checksums(store: CheckpointStore, step: int) -> None:
    """A checkpoint of a version that wrote no checksum of `driver.json`."""
    save(store, step)
    (store.root / f"step-{step}" / "driver.json.xxh3").unlink()


def test_a_checkpoint_of_an_earlier_version_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    old = {"step": 4, "weight_version": 4, "data_cursor": {}, "attempt": 1, "world_size": 2, "record": None}
    (tmp_path / "step-4" / "driver.json").write_text(json.dumps(old))
    store = lone_store(tmp_path, keep=1)
    for read in (lambda: store.newest_whole(damage_of_files, lambda *_: None), store.latest, lambda: store.read(4)):
        with pytest.raises(UnverifiedError, match=r"step-4: has no driver\.json\.xxh3.*--trust-unverified"):
            read()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-4"]
    found = Checkpoints(tmp_path, trust_unverified=True).find_whole()
    assert found is not None
    assert (found.state, found.verified) == (DriverState(4, 4, {}, 1, 2), False)


@pytest.mark.parametrize("trust", [False, True])
def test_one_that_cannot_be_verified_is_never_the_newest_beside_one_that_is(tmp_path: Path, trust: bool) -> None:
    store = CheckpointStore(tmp_path, 5, 1, lambda: None, trust_unverified=trust)
    as_before_checksums(store, 1)
    save(store, 2)
    as_before_checksums(store, 3)
    told: list[tuple[str, bool]] = []
    found = store.newest_whole(damage_of_files, lambda folder, one: told.append((folder.name, one.damaged)))
    assert found is not None
    assert (found.state.step, found.verified) == (2, True)
    assert told == [("step-3.unverified", False)]
    assert (tmp_path / "step-3.unverified" / "rank-1").exists()
    assert store.complete_steps() == [1, 2]
    # Where none is verified, the trusted ones are tried in their order.
    spoil(tmp_path / "step-2", "bit flip")
    as_before_checksums(store, 4)
    spoil(tmp_path / "step-4", "truncation")
    if not trust:
        with pytest.raises(JobError, match="no checkpoint is as it was written"):
            store.newest_whole(damage_of_files, lambda *_: None)
        return
    told.clear()
    found = store.newest_whole(damage_of_files, lambda folder, one: told.append((folder.name, one.damaged)))
    assert found is not None
    assert (found.state.step, found.verified) == (1, False)
    assert told == [("step-2.damaged", True), ("step-4.damaged", True)]


@pytest.mark.parametrize("name", ["../step-1/rank-0", "/dev/zero", "", ".", "..", "a\0b", "x" * 300, "a/b"])
def test_a_file_elsewhere_is_no_file_of_a_checkpoint(name: str) -> None:
    with pytest.raises(WireError, match="must be that of a file in the folder"):
        CheckedFile.parse({"name": name, "size": 1, "xxh3": "0" * 16})


@pytest.mark.parametrize("file", ["rank-1", "driver.json", "driver.json.xxh3"])
def test_an_error_that_passes_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    store = lone_store(tmp_path, keep=3)
    for step in (1, 2):
        save(store, step)
    real = io.open
    left: list[int] = []

    def sometimes(path: Any, *args: Any, **kwargs: Any) -> Any:
        if left and str(path).endswith(f"step-2/{file}"):
            number = left.pop()
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", sometimes)
    monkeypatch.setattr(io, "open", sometimes)
    told: list[Path] = []

    def newest() -> int:
        found = store.newest_whole(damage_of_files, lambda folder, _: told.append(folder))
        assert found is not None
        return found.state.step

    for number in (errno.EIO, errno.ENOENT):
        left.append(number)
        assert (newest(), left, told) == (2, [], []), "an error once"
    left.append(errno.ESTALE)
    with pytest.raises((JobError, OSError), match=r"Stale file handle"):
        newest()
    assert told == []
    left.extend([errno.EIO, errno.EIO])
    assert (newest(), [folder.name for folder in told]) == (1, ["step-2.damaged"]), "an error that stays"
