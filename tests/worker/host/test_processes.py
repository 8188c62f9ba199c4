from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rljob_worker.host.processes import ProcessIdentity, living
from rljob_worker.host.reaper import Reaper
from rljob_worker.host.secrets import secrets_of, withheld
from rljob_worker.host.sweeps import is_private, left_behind, own_folder, private_folder, private_folders


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
        folder.mkdir(mode=0o700)
        (folder / "file").touch()
    mine = own_folder("x-", tmp_path)
    assert mine.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.iterdir()) == [mine, other]


def _strangers(folder: Path, kind: str) -> None:
    """A folder that another user made, a link to one of ours, or one that others may write to."""
    if kind == "link":
        (elsewhere := folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(elsewhere)
        return
    folder.mkdir()
    folder.chmod(0o700 if kind == "owner" else 0o777)
    if kind == "owner":
        os.chown(folder, 12345, 12345)


KINDS = [
    pytest.param("owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")),
    "link",
    "mode",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_folder_that_others_made_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / "rljob-x-7"
    _strangers(theirs, kind)
    assert not is_private(theirs)
    ours = private_folder("rljob-x-7")
    assert ours != theirs
    assert is_private(ours)
    assert private_folder("rljob-x-7") == ours, "made once"
    assert private_folders("rljob-x-7") == [ours]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_this_process_that_others_made_first_is_passed_by(tmp_path: Path, kind: str) -> None:
    dead = tmp_path / f"x-{_ended()}"
    for folder in (tmp_path / f"x-{ProcessIdentity.own()}", dead):
        _strangers(folder, kind) if not (tmp_path / "elsewhere").exists() else folder.symlink_to(tmp_path / "elsewhere")
    mine = own_folder("x-", tmp_path)
    assert is_private(mine)
    assert dead.exists(), "theirs to remove"
    assert [*left_behind(tmp_path, "x-")] == [dead]


def test_an_own_folder_with_another_name_is_found_when_its_process_is_gone(tmp_path: Path) -> None:
    stale = tmp_path / f"x-{_ended()}.ab12"
    stale.mkdir(mode=0o700)
    own_folder("x-", tmp_path)
    assert not stale.exists()


def test_a_program_of_ours_hides_what_it_was_started_with() -> None:
    program = (
        "import ctypes; from rljob_worker.cli.main import main; main(['samples', '/nowhere']); "
        "print(ctypes.CDLL(None).prctl(3))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "0\n", "PR_GET_DUMPABLE"


def test_a_reaper_is_given_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-shell")
    reaper = Reaper()
    try:
        ends = time.monotonic() + 20
        # Empty for as long as the new process becomes its program.
        while not (variables := Path(f"/proc/{reaper._process.pid}/environ").read_bytes()):
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert b"PATH=" in variables
        assert b"hf_of-the-shell" not in variables
    finally:
        reaper.close()


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "hf_x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("OPENAI_API_KEY", "x", True),
        ("MODELSCOPE_API_TOKEN", "x", True),
        ("DB_PASSWORD", "x", True),
        ("DATABASE_URL", "postgres://user:word@host/db", True),
        ("PATH", "/usr/bin", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("HTTP_PROXY", "http://proxy:3128", False),
        ("MONKEY", "x", False),
    ],
)
def test_secrets_are_told_by_name_and_value(name: str, value: str, secret: bool) -> None:
    assert secrets_of({name: value}) == ({name: value} if secret else {})


def test_secrets_are_withheld_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "PATH_OF_TOKEN"):
        monkeypatch.setenv(name, "x")
    with withheld("PATH_OF_TOKEN") as found:
        assert found["HF_TOKEN"] == "x"
        assert "HF_TOKEN" not in os.environ
        assert os.environ["PATH_OF_TOKEN"] == "x"
    assert os.environ["HF_TOKEN"] == "x"
