"""A process that outlives its engine by a moment, to end the engine's workers and remove their shared memory.

vLLM's workers notice a dead parent once they serve; a worker that is still importing or loading does not, and the
shared memory of a killed engine stays. The guardian waits for the engine's end of a pipe to close, which the kernel
does however the engine ends. It runs as a script without site-packages: `python -I -S guardian.py OWNER PID RECORD`,
with the pipe as standard input.

Names of shared-memory files are also kept in RECORD, for an engine that was killed together with its guardian.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time

OWNER_VARIABLE = "RLJOB_ENGINE_OWNER"
_SHARED_MEMORY = re.compile(rb"/dev/shm/(psm_[0-9a-f]+|[^/\n]+-cpushm[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE)
_START_POLLS, _START_SECONDS, _SERVING_SECONDS = 240, 0.5, 10.0
_KILL_SECONDS = 5.0


def owned_processes(owner: str) -> list[int]:
    """Living processes that inherited the owner mark in their environment."""
    mark = f"{OWNER_VARIABLE}={owner}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read() + b"\0":
                    found.append(int(entry))
    return found


def shared_memory_names(pids: list[int]) -> set[str]:
    """Names in /dev/shm of vLLM's message queues and CPU collectives that these processes have mapped."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            names.update(os.fsdecode(name) for name in _SHARED_MEMORY.findall(maps.read()))
    return names


def remove(owner: str, names: set[str]) -> None:
    """End all processes of a dead owner and unlink its shared memory."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := owned_processes(owner)) and time.monotonic() < deadline:
        names |= shared_memory_names(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")


def main(owner: str, pid: int, record: str) -> None:
    """Watch until the pipe closes, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    names: set[str] = set()
    polls = 0
    while True:
        seconds = _START_SECONDS if polls < _START_POLLS else _SERVING_SECONDS
        if select.select([0], [], [], seconds)[0]:
            break
        polls += 1
        known = names | shared_memory_names([pid, *owned_processes(owner)])
        if known != names:
            names = known
            with open(record, "w", encoding="utf-8") as file:
                json.dump(sorted(names), file)
    remove(owner, names)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
