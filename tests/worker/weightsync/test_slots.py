from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sync_cases import own_mappings

from rljob_worker.errors import WeightSyncError
from rljob_worker.host import staging_slots
from rljob_worker.host.processes import ProcessIdentity, start_time
from rljob_worker.host.reaper_process import Remains
from rljob_worker.host.staging_slots import sweep
from rljob_worker.weightsync import shared_memory
from rljob_worker.weightsync.shared_memory import SharedMemory

DIE_AS_OWNER = """
import os, sys
from pathlib import Path
from rljob_worker.weightsync import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
slots = shared_memory.SharedMemory.create("orphan", 4096)
print(*slots.names, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in which these tests make slots: each sync that begins beside them sweeps /dev/shm itself."""
    with tempfile.TemporaryDirectory(prefix="rljob_slots.", dir=staging_slots.SHARED_MEMORY) as made:
        monkeypatch.setattr(staging_slots, "SHARED_MEMORY", Path(made))
        monkeypatch.setattr(shared_memory, "SHARED_MEMORY", Path(made))
        yield Path(made)


def test_what_one_mapping_writes_the_other_reads(folder: Path) -> None:
    owner = SharedMemory.create("test", 4096)
    try:
        other = SharedMemory.attach(owner.names, 4096)
        owner.tensor(1, 64, torch.bfloat16, (3, 5)).copy_(torch.arange(15).view(3, 5))
        assert other.tensor(1, 64, torch.bfloat16, (3, 5)).flatten().tolist() == list(range(15))
        assert not other.bytes_of(0).any()
        other.close()
        assert (folder / owner.names[0]).exists()
    finally:
        owner.close()
    assert not any((folder / name).exists() for name in owner.names)
    assert not own_mappings(owner.names[0])


def test_only_the_user_may_read_the_weights(folder: Path) -> None:
    owner = SharedMemory.create("test", 4096)
    try:
        assert os.stat(folder / owner.names[0]).st_mode & 0o077 == 0
    finally:
        owner.close()


def test_slots_of_dead_owners_are_swept_and_those_of_living_ones_kept(folder: Path) -> None:
    mine = SharedMemory.create("test", 4096)
    try:
        run = subprocess.run(
            [sys.executable, "-c", DIE_AS_OWNER, str(folder)], capture_output=True, text=True, timeout=60
        )
        orphans = run.stdout.split()
        assert len(orphans) == 2
        assert all((folder / name).exists() for name in orphans)
        # A recycled pid: the process lives, but started at another time than the name says.
        recycled = mine.names[0].replace(f"-{os.getpid()}-", "-1-")
        (folder / recycled).touch()
        foreign = folder / "rljob-test-1-1-1-0"
        foreign.touch()
        try:
            assert {*orphans, recycled} <= set(sweep())
            assert foreign.exists()
        finally:
            foreign.unlink()
        assert all((folder / name).exists() for name in mine.names)
    finally:
        mine.close()


def test_slots_of_an_owner_that_was_killed_go_though_it_still_lives(folder: Path) -> None:
    """A trainer may take seconds to give its memory back, and its name is none that a later sync may meet."""
    slots = SharedMemory.create("test", 4096)
    try:
        assert sweep() == []
        assert sorted(sweep([ProcessIdentity.own()])) == sorted(slots.names)
        assert not list(folder.iterdir())
    finally:
        slots.close()


def test_another_users_slots_do_not_stop_this_job(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """/dev/shm is sticky: root alone may remove what others left."""
    theirs = folder / f"rljob-test-{staging_slots._pid_namespace()}-{2**22}-1-0"
    theirs.touch()

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    try:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refused)
            assert theirs.name not in sweep()
    finally:
        theirs.unlink()


def test_too_little_shared_memory_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    before = set(folder.iterdir())
    with pytest.raises(WeightSyncError, match=r"bytes free.*bucketBytes"):
        SharedMemory.create("test", 2**50)
    assert set(folder.iterdir()) == before
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    with pytest.raises(WeightSyncError, match="is gone"):
        SharedMemory.attach(["rljob-test-1-1-1-0"], 4096)


def test_a_slot_of_another_size_is_refused() -> None:
    owner = SharedMemory.create("test", 4096)
    try:
        with pytest.raises(WeightSyncError, match="has 4096 bytes, expected 8192"):
            SharedMemory.attach(owner.names, 8192)
    finally:
        owner.close()


def test_a_run_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        SharedMemory.create("a/b", 4096)


def test_who_ends_what_a_dead_process_left_removes_its_slots_too(folder: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    started = start_time(process.pid)
    assert started is not None
    slot = folder / f"rljob-test-{staging_slots._pid_namespace()}-{process.pid}-{started}-0"
    slot.touch()
    try:
        Remains(ProcessIdentity(2**22, "1"), {process.pid: started}).remove()
        assert not slot.exists()
    finally:
        slot.unlink(missing_ok=True)
        process.kill()
        process.wait(60)
