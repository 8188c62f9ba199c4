"""A process that outlives its engine by a moment, to end the engine's workers and remove their shared memory.

vLLM's workers notice a dead parent once they serve, and take seconds to leave; a worker that is still importing or
loading does not notice, and the shared memory of a killed engine may stay. The reaper waits for the engine's end of
a pipe to close, which the kernel does however the engine ends; a byte before that says that the engine's processes
have all started, so that looking for new ones need no longer be frequent. It runs without site-packages, with the pipe
as standard input: see `reaper.Reaper`.

What is to be removed is also kept in a file, for an engine that was killed together with its reaper.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time

from rljob_worker.host import staging_slots
from rljob_worker.host.processes import ProcessIdentity, living

OWNER_VARIABLE = "RLJOB_ENGINE_OWNER"
_SHARED_MEMORY = re.compile(rb"/dev/shm/(psm_[0-9a-f]+|[^/\n]+-cpushm[^/\n ]*)")
_START_SECONDS, _SERVING_SECONDS = 0.5, 10.0
_KILL_SECONDS = 5.0


def _is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's own: it unlinks semaphores and leaves as soon as the last process it serves is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


def shared_memory_names(pids: set[int]) -> set[str]:
    """Names in /dev/shm of vLLM's message queues and CPU collectives that these processes have mapped."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            names.update(os.fsdecode(name) for name in _SHARED_MEMORY.findall(maps.read()))
    return names


class Remains:
    """Remains of an engine: processes with their start times, and names in /dev/shm."""

    def __init__(
        self, owner: ProcessIdentity, processes: dict[int, str] | None = None, names: set[str] | None = None
    ) -> None:
        self.owner = owner
        self.processes = dict(processes or {})
        self.names = set(names or ())

    def look(self, *, everywhere: bool = False) -> bool:
        """Find more of it; whether there was any.

        The engine's processes inherit its mark in their environment. vLLM overwrites what the kernel shows of that
        when it renames a worker, so they must be seen before: among the children of known processes, which is cheap,
        or `everywhere`.
        """
        before = (dict(self.processes), set(self.names))
        processes = living()
        family = {self.owner.pid} if processes.get(self.owner.pid, (0, ""))[1] == self.owner.started else set()
        self.processes = {
            pid: start for pid, start in self.processes.items() if processes.get(pid, (0, ""))[1] == start
        }
        for pid in sorted(processes.keys() - family - self.processes.keys(), key=lambda pid: int(processes[pid][1])):
            parent, start = processes[pid]
            related = everywhere or parent in family or parent in self.processes
            if related and self._marked(pid) and not _is_resource_tracker(pid):
                self.processes[pid] = start
        self.names |= shared_memory_names(family | self.processes.keys())
        return before != (self.processes, self.names)

    def remove(self) -> None:
        """End the processes and unlink the shared memory of a dead owner."""
        deadline = time.monotonic() + _KILL_SECONDS
        self.look(everywhere=True)
        while self.processes and time.monotonic() < deadline:
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            self.look(everywhere=True)
        for name in self.names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{name}")
        staging_slots.sweep([ProcessIdentity(pid, started) for pid, started in self.processes.items()])

    def _marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            return f"{OWNER_VARIABLE}={self.owner}".encode() in environ.read().split(b"\0")
        return False


def main(owner: str, record: str) -> None:
    """Watch until the pipe closes, then clean up.

    Args:
        owner: identity of the engine process.
        record: file that says what is to be removed, while this process lives.
    """
    identity = ProcessIdentity.parse(owner)
    assert identity is not None, owner
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    remains = Remains(identity)
    interval = _START_SECONDS
    while True:
        if select.select([0], [], [], interval)[0]:
            if not os.read(0, 1):
                break
            interval = _SERVING_SECONDS
        if remains.look():
            with open(record, "w", encoding="utf-8") as file:
                json.dump({"processes": remains.processes, "names": sorted(remains.names)}, file)
    remains.remove()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record)
