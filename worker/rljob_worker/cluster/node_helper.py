"""A process of one node that acts there for the driver. Light imports: Ray starts it anew for each job and node."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence

from rljob_worker.host import staging_slots
from rljob_worker.host.processes import ProcessIdentity, start_time
from rljob_worker.host.sockets import listen
from rljob_worker.host.sweeps import own_folder

_SYNC_FOLDER = "rljob-sync-"
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0


class NodeHelper:
    """Works on one node: as a plain object on the driver's own, as a Ray actor on others.

    Pids and folders mean nothing outside a pod, and a process that hangs or is stopped answers no call: what has to
    be done to one is done from beside it.
    """

    def __init__(self, root: str | None = None) -> None:
        """Make the node's scratch folder below `root` (default: the temporary folder); short, for unix sockets."""
        self._folder = own_folder(_SYNC_FOLDER, root)
        self._killed: list[ProcessIdentity] = []

    def folder(self) -> str:
        """Folder that trainers and engines of this node share, and nobody else."""
        return str(self._folder)

    def free_port(self, address: str) -> int:
        """A TCP port that nobody listens on at an address of this node."""
        with listen(address, 0) as probe:
            return int(probe.getsockname()[1])

    def missing(self, paths: Sequence[str], seconds: float) -> list[str]:
        """Paths that do not show up here within `seconds`; network file systems take a moment."""
        deadline = time.monotonic() + seconds
        while True:
            missing = [path for path in paths if not os.path.exists(path)]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_SECONDS)

    def signal(self, pids: Sequence[int], number: int) -> list[int]:
        """Send a signal to processes of this node; returns those that are gone."""
        gone = []
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                gone.append(pid)
        return gone

    def end(self, pids: Sequence[int], patience: float) -> None:
        """Kill the processes of this node that do not leave within `patience`, and wait a moment for them to be gone.

        They hold what `close` removes.
        """
        _wait_for_end(pids, patience)
        late = [ProcessIdentity(pid, started) for pid in pids if (started := start_time(pid))]
        self.signal([process.pid for process in late], signal.SIGKILL)
        self._killed += late
        _wait_for_end(pids, _END_SECONDS)

    def close(self) -> None:
        """Remove the folder, and the staging slots of trainers that were killed, also of slow ones; idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        staging_slots.sweep(self._killed)


def _wait_for_end(pids: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(start_time(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
