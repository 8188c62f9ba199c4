"""No process and no shared memory of an engine outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rljob_worker.rollout import guardian

_STOP_SECONDS = 15.0


class Guardian:
    """The guardian process of this engine process; see `guardian`."""

    def __init__(self) -> None:
        owner = f"{os.getpid()}-{guardian.start_time(os.getpid())}"
        # The guardian must not carry the mark of what it ends.
        environment = {name: value for name, value in os.environ.items() if name != guardian.OWNER_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, owner, str(_records() / owner)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        os.environ[guardian.OWNER_VARIABLE] = owner

    def settled(self) -> None:
        """Say that all processes have started: looking for new ones takes time from the engine."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()

    def close(self) -> None:
        """Have the guardian clean up now and wait for it."""
        os.environ.pop(guardian.OWNER_VARIABLE, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_STOP_SECONDS)


def sweep_dead_engines() -> None:
    """Remove what engines of this user left that were killed together with their guardians."""
    for record in _records().iterdir():
        pid, started = record.name.split("-")
        if guardian.start_time(int(pid)) == started:
            continue
        with contextlib.suppress(FileNotFoundError):
            try:
                saved = json.loads(record.read_text(encoding="utf-8"))
            except json.JSONDecodeError:
                saved = {"processes": {}, "names": []}  # killed while writing it; marked processes are still found
            processes = {int(pid): start for pid, start in saved["processes"].items()}
            guardian.Remains(record.name, processes, set(saved["names"])).remove()
            record.unlink()


def _records() -> Path:
    folder = Path(tempfile.gettempdir()) / f"rljob-engines-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder}: belongs to another user")
    return folder
