"""Paths that stand for what a confined process may read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_worker.confined.access import files_of
from rljob_worker.confined.files import Files, readable


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a project in it, which has a run folder and links."""
    for name in ("home/project/code", "home/project/runs/a", "home/.cache/huggingface/hub", "home/data", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("home/.netrc", "home/.cache/huggingface/token", "home/project/.env", "home/project/code/f.py"):
        (tmp_path / name).touch()
    (tmp_path / "home/project/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "home/project/all").symlink_to("/")
    (tmp_path / "home/project/up").symlink_to(tmp_path / "home")
    return tmp_path / "home"


def may_read(files: Files, path: Path) -> bool:
    allowed = [os.path.realpath(name) for name in readable(files) if os.path.exists(name)]
    real = os.path.realpath(path)
    return any(real == name or real.startswith(f"{name}/") for name in allowed)


@pytest.mark.parametrize("workdir", ["project", "project/code", ".", ".."])
def test_hidden_files_and_the_run_are_left_out_of_what_lies_around(home: Path, workdir: str) -> None:
    variables = {"HOME": str(home), "PATH": os.defpath}
    files = files_of([home / workdir, home / "project/code"], [], [], [home / "project/runs/a"], variables)
    for name in (".netrc", ".cache/huggingface/token", "project/runs/a"):
        assert not may_read(files, home / name), name
    assert may_read(files, home / "project/code/f.py")
    assert may_read(files, home / ".cache/huggingface/hub")
    assert may_read(files, home / "project/linked") == (workdir != "project/code")
    assert may_read(files, home / "data") == (workdir in (".", ".."))
    if workdir == "project":
        assert not may_read(files, home / "project/.env")


def test_the_root_folder_is_never_meant(tmp_path: Path) -> None:
    files = files_of([Path("/")], ["/"], [], [], {"HOME": "/", "PATH": "/"})
    assert "/" not in list(readable(files))
    assert not may_read(files, tmp_path)
