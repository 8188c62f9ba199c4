"""Full, failing and read-only disks at each write of a run, without Ray or Megatron; `disk_run.py` has the run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.disk_faults import Fault, library
from support.samples import ALL, SEED

CASES = 0 if ALL else 80
RUN = Path(__file__).with_name("disk_run.py")


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """In memory where there is such a place."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rljob-test-", dir=shared if os.access(shared, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(3600 if ALL else 300)
def test_whatever_a_disk_does_nothing_saved_is_lost_and_each_step_is_counted_once(fast_folder: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(RUN), str(fast_folder), str(SEED), str(CASES)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    said: dict[str, Any] = json.loads(ended.stdout)
    found = said["faults"]
    assert found["wrong"] == [], f"seed {SEED}, {len(found['wrong'])} of {sum(found['ends'].values())} cases"
    assert found["calls"] > 150, "the run hardly writes"
    # Some faults a run does not notice (a file that may wait, a folder that is deleted later); most end it.
    assert min(found["ends"]["exit code 0"], found["ends"]["exit code 1"]) > CASES / 20
    _goes_on_without(said["degraded"])
    path, _, wrong = said["exported"].partition(": ")
    assert path == str(fast_folder / "export" / ".part-0")
    assert re.match(r"No space left on device \(4000 bytes wanted, \d+ bytes free\)", wrong), wrong


def _goes_on_without(found: dict[str, dict[str, Any]]) -> None:
    """Faults of what the training does not need are counted and reported, and the run reaches its last step."""
    told = {
        "/trajectories": ("trajectories", 0),
        "/tensorboard": ("TensorBoard events", 0),
        "/events.jsonl": ("events", 0),
        "/steps.jsonl": ("step records", 1),
        "/summary.json": ("the summary", 1),
    }
    for place, (what, code) in told.items():
        case = found[place]
        assert (case["exit_code"], case["reached"]) == (code, 6), f"{place}: {case}"
        assert case["failures"][what] >= 1
        assert list(case["failures"]) == [what]
        assert case["told"] == ([] if what == "events" else [what]), "an event for the first of them"
    message = found["/steps.jsonl"]["message"]
    assert "6 step records cannot be written" in message
    assert "steps.jsonl: No space left on device (" in message
    assert " bytes wanted, " in message
    assert " bytes free)" in message


def _faulty(code: str, fault: Fault, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **fault.environment(tmp_path / "marker")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_injector_fails_the_call_that_it_is_told_to(tmp_path: Path) -> None:
    code = (
        "import errno, os, sys, threading\n"
        "def write():\n"
        "    for _ in range(100):\n"
        "        try: os.write(file, b'12')\n"
        "        except OSError as error: seen.append(error.errno)\n"
        "seen = []\n"
        "file = os.open(sys.argv[1] + '/file', os.O_WRONLY | os.O_CREAT)\n"
        "other = os.open(sys.argv[1] + '/../other', os.O_WRONLY | os.O_CREAT)\n"
        "threads = [threading.Thread(target=write) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "os.write(other, b'12')\n"
        "print(len(seen), set(seen), os.fstat(file).st_size)\n"
    )
    (tmp_path / "here").mkdir()
    here = tmp_path / "here"
    once = _faulty(code, Fault(here, 7, errno.EIO, calls="write"), tmp_path, str(here))
    assert once.stdout.split() == ["1", f"{{{errno.EIO}}}", "798"], once.stderr
    assert (tmp_path / "marker").exists()
    (tmp_path / "marker").unlink()
    (here / "file").unlink()
    torn = _faulty(code, Fault(here, 8, errno.EIO, calls="write", short=True), tmp_path, str(here))
    assert torn.stdout.split() == ["1", f"{{{errno.EIO}}}", "797"], "half a write, and one that fails"
    (tmp_path / "marker").unlink()
    (here / "file").unlink()
    good = Fault(here, 8, errno.ENOSPC, calls="write", forever=True, short=True)
    assert _faulty(code, good, tmp_path, str(here)).stdout.split() == ["392", f"{{{errno.ENOSPC}}}", "15"]


@pytest.mark.parametrize("closed", [False, True], ids=["full disk", "closed pipe"])
def test_an_output_that_takes_nothing_does_not_end_a_process(closed: bool) -> None:
    code = (
        "import sys; from rljob_worker.host.files import keep_output_from_raising\n"
        "keep_output_from_raising(); print('x' * 100000, flush=True); print('y'); sys.exit(7)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    if closed:
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    assert subprocess.run(command, env=environment, stdout=write, timeout=60, check=False).returncode == 7
    os.close(write)
