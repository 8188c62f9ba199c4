"""No process and no shared memory of an engine outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from rljob_worker.host import reaper_process
from rljob_worker.host.processes import ProcessIdentity
from rljob_worker.host.secrets import secrets_of
from rljob_worker.host.sweeps import left_behind, private_folder, private_folders

_STOP_SECONDS = 15.0
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    f"import sys; sys.path.insert(0, sys.argv[1]); from {reaper_process.__name__} import main; main(*sys.argv[2:])"
)


class Reaper:
    """The reaper process of this engine process; see `reaper_process`."""

    def __init__(self) -> None:
        owner = str(ProcessIdentity.own())
        # The reaper must not carry the mark of what it ends.
        left_out = {reaper_process.OWNER_VARIABLE, *secrets_of(os.environ)}
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT, owner, str(private_folder(_records()) / owner)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        os.environ[reaper_process.OWNER_VARIABLE] = owner

    def settled(self) -> None:
        """Say that all processes have started: looking for new ones takes time from the engine."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()

    def close(self) -> None:
        """Have the reaper clean up now and wait for it."""
        os.environ.pop(reaper_process.OWNER_VARIABLE, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_STOP_SECONDS)


def sweep_dead_engines() -> None:
    """Remove what engines of this user left that were killed together with their reapers."""
    for folder in private_folders(_records()):
        for record in left_behind(folder):
            _remove(record)


def _remove(record: Path) -> None:
    owner = ProcessIdentity.parse(record.name.partition(".")[0])
    assert owner is not None
    with contextlib.suppress(FileNotFoundError):
        try:
            saved = json.loads(record.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            saved = {"processes": {}, "names": []}  # killed while writing it; marked processes are still found
        processes = {int(pid): start for pid, start in saved["processes"].items()}
        reaper_process.Remains(owner, processes, set(saved["names"])).remove()
        record.unlink()


def _records() -> str:
    """Beginning of the names of the folders with records."""
    return f"rljob-engines-{os.getuid()}"
