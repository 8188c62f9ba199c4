"""Names of the weight sync's staging slots in /dev/shm, and removing those that nobody will remove."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from rljob_worker.host.processes import ProcessIdentity

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rljob-(?P<run>[A-Za-z0-9_.]+)-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-(?P<index>\d+)")


def names(run: str, count: int) -> list[str]:
    """Names of this process's slots of a run; ValueError when `run` holds more than letters, digits, `_`, `.`.

    No other user can make them first: they end with a random number.
    """
    process = f"rljob-{run}-{_pid_namespace()}-{ProcessIdentity.own()}"
    made = [f"{process}-{i}{secrets.randbelow(10**12):012}" for i in range(count)]
    if not all(_NAME.fullmatch(name) for name in made):
        raise ValueError(f"slots of run {run!r}: run may hold letters, digits, '_' and '.'")
    return made


def sweep(ending: Collection[ProcessIdentity] = ()) -> list[str]:
    """Remove the slots of owners that are dead, or were killed and are slow to go; returns their names.

    A process that was killed may take seconds to give its memory back, and uses no name any more. Slots made in another
    PID namespace (a container that shares /dev/shm) are left alone: their owners are not to be seen from here.

    Args:
        ending: processes that were killed.
    """
    removed = []
    for path in SHARED_MEMORY.glob("rljob-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["namespace"]) != _pid_namespace():
            continue
        owner = ProcessIdentity(int(match["pid"]), match["started"])
        if owner in ending or not owner.alive():
            with suppress(PermissionError):  # another user's: theirs to remove
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
