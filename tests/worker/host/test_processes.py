from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rljob_worker.host.processes import ProcessIdentity, living
from rljob_worker.host.sweeps import left_behind, own_folder


def _ended() -> ProcessIdentity:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    parent, started = living()[child.pid]
    assert parent == os.getpid()
    identity = ProcessIdentity(child.pid, started)
    assert identity.alive()
    child.kill()
    while identity.alive():  # a zombie is not
        pass
    child.wait(20)
    return identity


def test_an_identity_names_one_process_for_good() -> None:
    own = ProcessIdentity.own()
    assert own.alive()
    assert ProcessIdentity.parse(str(own)) == own
    assert not ProcessIdentity(own.pid, str(int(own.started) + 1)).alive(), "another process had this pid"
    assert not _ended().alive()
    for text in ("", "12", "12-", f"{own}-3", f"x{own}", "-1-3"):
        assert ProcessIdentity.parse(text) is None


def test_only_what_dead_processes_left_is_found(tmp_path: Path) -> None:
    dead, own = _ended(), ProcessIdentity.own()
    for name in (f"a-{dead}", f"a-{own}", f"b-{dead}", "a-notes", f"a-{dead}-more"):
        (tmp_path / name).touch()
    assert [path.name for path in left_behind(tmp_path, "a-")] == [f"a-{dead}"]


def test_a_folder_of_this_process_replaces_those_of_dead_ones(tmp_path: Path) -> None:
    stale, other = tmp_path / f"x-{_ended()}", tmp_path / f"y-{_ended()}"
    for folder in (stale, other):
        folder.mkdir()
        (folder / "file").touch()
    mine = own_folder("x-", tmp_path)
    assert mine.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.iterdir()) == [mine, other]
