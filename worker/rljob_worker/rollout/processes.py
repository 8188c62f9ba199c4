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

_STOP_SECONDS = 10.0


class Guardian:
    """The guardian process of this engine process; see `guardian`."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.owner = f"{pid}-{_start_time(pid)}"
        # The guardian must not carry the mark of what it ends.
        environment = {name: value for name, value in os.environ.items() if name != guardian.OWNER_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, self.owner, str(pid), str(_records() / self.owner)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        os.environ[guardian.OWNER_VARIABLE] = self.owner

    def close(self) -> None:
        """Have the guardian clean up now and wait for it."""
        os.environ.pop(guardian.OWNER_VARIABLE, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_STOP_SECONDS)


def sweep_dead_engines() -> None:
    """Remove what engines of this user left that were killed together with their guardians."""
    for record in _records().iterdir():
        owner = record.name
        pid, started = owner.split("-")
        if _start_time(int(pid)) == started:
            continue
        with contextlib.suppress(FileNotFoundError):
            try:
                names = set(json.loads(record.read_text(encoding="utf-8")))
            except json.JSONDecodeError:
                names = set()  # killed while writing it; the processes are still ended by their mark
            guardian.remove(owner, names)
            record.unlink()


def _records() -> Path:
    folder = Path(tempfile.gettempdir()) / f"rljob-engines-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder}: belongs to another user")
    return folder


def _start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; tells a reused pid from the process that had it. None: no such."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]
