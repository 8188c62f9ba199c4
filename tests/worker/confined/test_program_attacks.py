"""Reach of a policy's program in the sandbox: attacks from inside, as root, as another user and as in a pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from test_confinement import NEWEST, WHO, confined, needs_landlock, needs_root
from test_confinement import place as place

from rljob_worker.sandbox import namespaces

needs_bubblewrap = pytest.mark.skipif(bool(namespaces.problem()), reason="no bubblewrap, or no user namespaces")


@needs_landlock
@pytest.mark.parametrize("who", WHO)
def test_attacks_of_a_program_are_refused(place: Path, who: str) -> None:
    done = confined(place, who, str(place / "code" / "program_runner.py"), str(place), memory=2**30)
    assert done.returncode == 0, done.stderr
    refused, allowed = json.loads(done.stderr.removeprefix("reward | "))
    assert [name for name, error in refused.items() if not error] == []
    assert {name: error for name, error in allowed.items() if error} == {}
    assert len(refused) > 30
    assert not list((place / "tmp").iterdir())


@needs_bubblewrap
@pytest.mark.parametrize("who", ["root", pytest.param("user", marks=needs_root)])
@pytest.mark.parametrize("abi", [NEWEST, 0])
def test_attacks_in_namespaces_are_refused_without_landlock_too(place: Path, who: str, abi: int) -> None:
    done = in_namespaces(place, who, abi)
    assert done.returncode == 0, done.stderr
    refused, allowed = json.loads(done.stderr.removeprefix("reward | "))
    # In the root's are no folders of others, but the system's.
    assert {name for name, error in refused.items() if not error} <= (set() if abi else {"folders of others"})
    assert {name: error for name, error in allowed.items() if error} == {}
    # They are not there at all.
    absent = ("file", "another's memory", "another's variables", "/proc", "its own /proc", "/dev/shm")
    said = {name: refused[name] for name in (*absent, "what a reward may read", "/etc/passwd")}
    assert abi or all(error.startswith("FileNotFoundError") for error in said.values()), said
    assert not list((place / "tmp").iterdir())


@needs_bubblewrap
@needs_root
def test_where_there_are_no_namespaces_no_program_runs(place: Path) -> None:
    done = in_namespaces(place, "pod", NEWEST)
    assert done.returncode == 1
    assert "reward | bwrap: " in done.stderr
    assert "SandboxError: the sandbox's server" in done.stderr


def in_namespaces(place: Path, who: str, abi: int) -> subprocess.CompletedProcess[str]:
    runner = str(place / "code" / "program_runner.py")
    return confined(place, who, runner, str(place), "namespaces", memory=2**30, abi=abi)
