"""Two drivers of one job that no lock keeps apart: whatever the order of their calls, one commits."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interleaving import interleave
from jobs import checked
from support.flips import flips
from support.samples import ALL, SEED, drawn
from test_run_folder import job

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.errors import FencedError, JobError, UserError

RANKS, KEEP, SAVES = 2, 2, 2
FIRST = -1
"""A driver that saved one checkpoint before the others came."""
ROUNDS = 2000 if ALL else 60
PLACES = ["run folder", "checkpoint.path"]
Choose = Callable[[list[int], int], int]


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot lock files; and one that is fast: what is synced to disk is not tried here."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Drivers:
    """Drivers of one job, each with its own memory, in one run folder."""

    def __init__(self, path: Path, elsewhere: bool) -> None:
        self.run = path / "run"
        self.root = path / "shared" if elsewhere else self.run / "checkpoints"
        self.job = job(checkpoint={"keep": KEEP, "path": str(self.root) if elsewhere else None})
        self.epochs: dict[int, int] = {}
        """Number that each driver got."""
        self.saved: list[tuple[int, int]] = []
        """(driver, step) of each commit whose success was reported."""
        self.restored: dict[int, int] = {}
        """Step that each driver went on from."""
        self.work(FIRST, saves=1)()

    def work(self, number: int, saves: int = SAVES) -> Callable[[], None]:
        """A driver from its start: take the folder, restore, then save some checkpoints."""

        def drive() -> None:
            folder = RunFolder(self.run, self.job, resume="auto")
            self.epochs[number] = folder._claim.epoch
            store = folder.checkpoints()
            found = store.newest_whole(self.damage, lambda *_: None)
            step = self.restored[number] = 0 if found is None else found.state.step
            for _ in range(saves):
                step += 1
                being_written = store.begin(step)
                try:
                    for rank in range(RANKS):
                        with open(being_written / f"rank-{rank}", "w") as file:
                            file.write(f"{number} {step} {rank}")
                    files = tuple(checked(being_written / f"rank-{rank}") for rank in range(RANKS))
                except FileNotFoundError as error:
                    # As a trainer's error comes to the driver.
                    raise JobError(f"checkpoint: trainer: {error}") from None
                state = DriverState(step, step, {"driver": number}, folder.attempt, RANKS, files=files)
                store.commit(being_written, state)
                self.saved.append((number, step))

        return drive

    def damage(self, state: DriverState, folder: Path) -> str:
        """Whether all ranks' files are there, and those of the driver that committed."""
        wanted = [f"{state.data_cursor['driver']} {state.step} {rank}" for rank in range(RANKS)]
        try:
            found = [(folder / f"rank-{rank}").read_text() for rank in range(RANKS)]
        except FileNotFoundError as error:
            return str(error)
        return "" if found == wanted else f"{found} instead of {wanted}"

    def newest(self) -> DriverState | None:
        """State from which a driver that comes now would go on; it is whole."""
        newest = Checkpoints(self.root).latest()
        if newest is not None:
            assert not self.damage(newest, Checkpoints(self.root).folder(newest.step))
        return newest


def check(drivers: Drivers, ends: list[Any]) -> None:
    """One line of checkpoints: nothing that was saved is lost, and nothing comes from a driver that was given up."""
    last = max(drivers.epochs, key=drivers.epochs.__getitem__)
    assert ends[last].error is None, f"the last driver was kept from its work: {ends[last].error!r}"
    for number, end in enumerate(ends):
        done = end.error is None and [saver for saver, _ in drivers.saved].count(number) == SAVES
        assert number == last or done or isinstance(end.error, JobError), repr(end.error)
    began = drivers.restored[last]
    for number, step in drivers.saved:
        assert number == last or step <= began, f"driver {number} committed step {step}, driver {last} began at {began}"
    newest = drivers.newest()
    assert newest is not None
    assert newest.data_cursor["driver"] == last
    assert newest.step == began + SAVES


def after(calls: int) -> Choose:
    """The first driver makes so many calls, then the second all of its, then the first goes on."""

    def choose(alive: list[int], number: int) -> int:
        return alive[0] if number < calls or len(alive) == 1 else alive[1]

    return choose


@pytest.mark.parametrize("place", drawn("a driver that stalls", PLACES))
@pytest.mark.usefixtures("no_locks")
def test_a_driver_that_stalls_at_any_call_commits_nothing_more(tmp_path: Path, place: str) -> None:
    for calls in range(1000):
        drivers = Drivers(tmp_path / str(calls), place != PLACES[0])
        ends = interleave([drivers.work(0), drivers.work(1)], after(calls), drivers.newest)
        check(drivers, ends)
        if drivers.epochs.get(0, 9) < drivers.epochs.get(1, 0) and ends[0].error is None:
            break
        shutil.rmtree(tmp_path / str(calls))
    assert calls > 40, "the first was done before the second came"


@pytest.mark.parametrize("place", drawn("drivers in any order", PLACES))
@pytest.mark.usefixtures("no_locks")
def test_of_drivers_in_any_order_the_last_one_alone_goes_on(tmp_path: Path, place: str) -> None:
    chance = random.Random(SEED)
    fenced = 0
    for round in range(ROUNDS):
        drivers = Drivers(tmp_path / str(round), place != PLACES[0])
        count = chance.choice([2, 2, 3])
        stay = chance.choice([0.0, 0.5, 0.9, 0.97])
        ends = interleave([drivers.work(i) for i in range(count)], wandering(chance, stay), drivers.newest)
        try:
            check(drivers, ends)
        except AssertionError as error:
            raise AssertionError(f"round {round} of seed {SEED}: {error}") from error
        fenced += sum(isinstance(end.error, FencedError) for end in ends)
        shutil.rmtree(tmp_path / str(round))
    assert fenced > ROUNDS / 2


def wandering(chance: random.Random, stay: float) -> Choose:
    """The driver whose turn it is keeps it with that probability."""
    current = 0

    def choose(alive: list[int], _: int) -> int:
        nonlocal current
        if current not in alive or chance.random() >= stay:
            current = chance.choice(alive)
        return current

    return choose


def test_checkpoint_path_is_locked_for_runs_in_other_folders_too(tmp_path: Path) -> None:
    shared = job(checkpoint={"path": str(tmp_path / "shared")})
    first = RunFolder(tmp_path / "one", shared, resume=False)
    with pytest.raises(UserError, match=r"shared: another rljob driver is running in this folder"):
        RunFolder(tmp_path / "two", shared, resume=False)
    first.close()
    second = RunFolder(tmp_path / "two", shared, resume=False)
    assert (second.attempt, json.loads((tmp_path / "shared" / "owner.json").read_text())["epoch"]) == (1, 2)
    with pytest.raises(FencedError, match="taken over by driver 2; this one, 1, was given up"):
        first.check()
    second.check()
    second.close()


@pytest.mark.parametrize("name", ["shared/owner.json", "run/run.json", "shared/.epochs/1"])
def test_a_flipped_bit_is_no_later_driver(tmp_path: Path, name: str) -> None:
    """Neither is it taken for one, nor does it hide one: what is damaged says nothing of the owner."""
    folder = RunFolder(tmp_path / "run", job(checkpoint={"path": str(tmp_path / "shared")}), resume=False)
    refused, tried = list[str](), 0
    for tried, where in enumerate(flips(tmp_path / name), 1):  # noqa: B007
        try:
            folder.check()
        except FencedError as error:
            raise AssertionError(where) from error
        except JobError as error:
            refused.append(str(error))
    assert len(refused) == tried > 100
    assert all(f"{name}: " in one and "cannot tell whether this run is still" in one for one in refused)
    folder.check()
    folder.close()


def test_a_checkpoint_path_in_the_run_folder_is_locked_with_it(tmp_path: Path) -> None:
    for path in (tmp_path / "run", tmp_path / "run" / "mine"):
        folder = RunFolder(tmp_path / "run", job(checkpoint={"path": str(path)}), resume=False)
        folder.check()
        folder.discard_if_new()
        folder.close()


def test_a_first_attempt_that_never_started_leaves_nothing_in_checkpoint_path(tmp_path: Path) -> None:
    for made in (True, False):
        if not made:
            (tmp_path / "shared").mkdir()
        folder = RunFolder(tmp_path / "run", job(checkpoint={"path": str(tmp_path / "shared")}), resume=False)
        folder.discard_if_new()
        folder.close()
        assert not (tmp_path / "run").exists()
        assert (tmp_path / "shared").exists() is not made


def test_a_run_of_a_version_without_epochs_goes_on(tmp_path: Path) -> None:
    RunFolder(tmp_path, job(), resume=False).close()
    content = json.loads((tmp_path / "run.json").read_text())
    old = {"job": content["job"], "attempt": 7, "pid": 1}
    (tmp_path / "run.json").write_text(json.dumps(old))
    shutil.rmtree(tmp_path / ".epochs")
    (tmp_path / "checkpoints" / "step-4.incomplete").mkdir(parents=True)
    folder = RunFolder(tmp_path, job(), resume=True)
    assert folder.attempt == 8
    folder.check()
    folder.checkpoints().begin(5)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-5.a8.incomplete"]
    folder.close()


@pytest.mark.usefixtures("no_locks")
def test_a_driver_that_was_given_up_says_so_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, job(), resume=False)
    second = RunFolder(tmp_path, job(), resume=True)
    assert first.is_taken_over()
    assert not second.is_taken_over()
    with pytest.raises(FencedError) as caught:
        first.checkpoints().begin(1)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "checkpoints").exists()
    second.checkpoints().begin(1)


@pytest.mark.parametrize("gone", ["run.json", ".epochs", ""])
def test_a_run_folder_that_vanished_is_no_place_to_save(tmp_path: Path, gone: str) -> None:
    folder = RunFolder(tmp_path / "run", job(), resume=False)
    shutil.rmtree(tmp_path / "run" / gone) if gone != "run.json" else (tmp_path / "run" / gone).unlink()
    with pytest.raises(JobError, match=r"cannot tell whether this run is still this driver's"):
        folder.checkpoints().begin(1)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.usefixtures("no_locks")
def test_a_run_folder_that_was_made_anew_is_another_drivers(tmp_path: Path) -> None:
    """It counts from 1 again, so that a driver which was there before has a higher number than the owner."""
    for _ in range(2):
        RunFolder(tmp_path / "run", job(), resume="auto").close()
    third = RunFolder(tmp_path / "run", job(), resume=True)
    shutil.rmtree(tmp_path / "run")
    for epoch in (1, 2, 3):
        RunFolder(tmp_path / "run", job(), resume="auto").close()
        assert json.loads((tmp_path / "run" / "run.json").read_text())["epoch"] == epoch
        with pytest.raises(JobError):
            third.checkpoints().begin(1)
    assert not (tmp_path / "run" / "checkpoints").exists()
