"""Run folders in which a pipe or a device has the place of a file: a sentence, and nobody waits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_worker.checkpoints.fencing import Owner, lock_folder
from rljob_worker.checkpoints.journal import read_journal
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.cli.main import main
from rljob_worker.errors import JobError, UserError
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.events import EventLog
from rljob_worker.records.steps import StepLog
from rljob_worker.report import build  # noqa: F401  (its libraries take seconds, which is no waiting)

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
OLD_RUN = Path(__file__).parents[1] / "records" / "old_run"
WRONG = {"folder": "is a folder, not a file"} | dict.fromkeys(("pipe", "device"), "is a pipe or device, not a file")
COMMANDS = {"report": [], "view": [], "trace": [], "samples": [], "export": ["--to", "exported"]}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A copy of a run, and an end to each wait for a pipe in it."""

    def too_long(*_: object) -> None:
        raise AssertionError("still waiting")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield shutil.copytree(OLD_RUN, tmp_path / "run")
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.mkdir()


def refused(capsys: pytest.CaptureFixture[str], command: str, folder: Path) -> str:
    assert main([command, str(folder), *COMMANDS[command]]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("command", COMMANDS)
def test_run_json(capsys: pytest.CaptureFixture[str], folder: Path, command: str, kind: str) -> None:
    put(folder / "run.json", kind)
    said = refused(capsys, command, folder)
    assert said == f"rljob: {folder / 'run.json'}: cannot be read: {WRONG[kind]}\n"


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("report", "steps.jsonl"),
        ("trace", "steps.jsonl"),
        ("samples", "trajectories/step-000002.jsonl.gz"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_else_a_command_reads(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, file: str, kind: str
) -> None:
    put(folder / file, kind)
    said = refused(capsys, command, folder)
    assert f"{folder / file}: " in said
    assert WRONG["pipe"] in said


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pipe.jsonl", "pipe.jsonl is not a file"),
        ("pipe", "pipe is neither a file nor a folder"),
        ("no.parquet", "no.parquet does not exist"),
        ("a" * 300, "a" * 300 + ": File name too long"),
        ("table.txt.d", "table.txt.d: not a .jsonl or .parquet file"),
    ],
)
def test_data_is_refused_before_the_worker_is_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "rljob_worker.driver.run", None)
    for pipe in ("pipe", "pipe.jsonl"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "table.txt.d").write_text("")
    spec = {"sets": [{"name": "held-out", "path": str(tmp_path / path)}]}
    argv = ["run", str(QUICKSTART), "--output", str(tmp_path / "run"), "--set", f"spec.evaluation={json.dumps(spec)}"]
    assert main(argv) == 2
    assert capsys.readouterr().err == f"rljob: spec.evaluation.sets[0].path: {tmp_path}/{message}\n"
    assert not (tmp_path / "run").exists()


def test_what_a_driver_reads(folder: Path) -> None:
    put(folder / "steps.jsonl", "pipe")
    with pytest.raises(JobError, match=r"steps\.jsonl: cannot be read: is a pipe or device"):
        StepLog(folder)
    put(folder / "step-2" / "driver.json", "pipe")
    with pytest.raises(JobError, match=r"driver\.json: cannot be read: is a pipe or device"):
        Checkpoints(folder, trust_unverified=True).read(2)
    put(folder / "owner.json", "pipe")
    with pytest.raises(OSError, match="is a pipe or device"):
        Owner.read(folder / "owner.json")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_a_resume_reads(folder: Path, kind: str) -> None:
    said = r"is a pipe or device|is a folder|Too many levels of symbolic links|Is a directory|No such device"
    put(folder / "steps.jsonl", kind)
    with pytest.raises(JobError, match=rf"steps\.jsonl: cannot be read: ({said})"):
        StepLog(folder)
    put(folder / "events.jsonl", kind)
    with pytest.raises(OSError, match=said):
        EventLog(folder, 2)
    with pytest.raises(OSError, match=said):
        read_events(folder)
    path = folder / "journal" / "step-000002.jsonl.gz"
    put(path, kind)
    with pytest.raises(UserError, match=rf"step-000002\.jsonl\.gz: damaged: .*({said})"):
        read_journal(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_a_lock_that_is_no_file_is_not_waited_for(folder: Path, kind: str) -> None:
    put(folder / ".lock", kind)
    with pytest.raises(JobError, match=r"\.lock: cannot be opened for writing"):
        lock_folder(folder, 0.0)
