"""A look at Ray's own processes beside whatever waits for them: Ray is silent for a minute, and then aborts."""

from __future__ import annotations

import errno
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rljob_worker.errors import RayLostError

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_REFUSALS = 10
"""So often in a row a cluster's GCS refuses to be asked: one that is started anew is there again sooner."""
_END_SECONDS = 7.0
"""The driver may take so long to end by itself once a process of Ray's is gone: a call of Ray's may hold it."""
Look = Callable[[], str]
"""Finds the parts of Ray that are gone, and how; empty while all are there."""


def dead_process(started: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> str:
    """The first of the processes, each with its name, that has ended."""
    for name, process in started:
        code = process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"Ray's {name} {how}"
    return ""


class ClusterLook:
    """The `Look` at a cluster of somebody else: its GCS, and the raylet of this node.

    Args:
        gcs: HOST:PORT.
        raylet: path of the raylet's socket.
    """

    def __init__(self, gcs: str, raylet: str) -> None:
        self._host, _, port = gcs.rpartition(":")
        self._port = int(port)
        self._raylet = raylet
        self._refused = 0

    def __call__(self) -> str:
        """Ask both for a connection; what does not answer at all may be paused, and only a refusal counts."""
        if _refuses(socket.AF_UNIX, self._raylet):
            return f"the raylet of this node is gone ({self._raylet} refuses)"
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._refused = self._refused + 1 if _refuses(family, (self._host.strip("[]"), self._port)) else 0
        return f"the GCS of the Ray cluster is gone ({self._host}:{self._port} refuses)" * (self._refused >= _REFUSALS)


def _refuses(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as asked:
        asked.settimeout(_CONNECT_SECONDS)
        try:
            asked.connect(address)
        except OSError as error:
            return error.errno in (errno.ECONNREFUSED, errno.ENOENT)
    return False


class RayWatch:
    """Says that a process of Ray's is gone, to each wait that asks, and ends this process if none does.

    Args:
        on_overdue: called with what is to be said before this process is ended.
    """

    def __init__(self, on_overdue: Callable[[str], None]) -> None:
        self._on_overdue = on_overdue
        self._look: Look = lambda: ""
        self._lock = threading.Lock()
        self._lost = ""
        self._over = threading.Event()

    def begin(self, look: Look) -> None:
        """From here on there is a Ray to look at."""
        self._look = look

    def check(self) -> None:
        """Nothing while Ray is there; at most a moment old. RayLostError when a process of it is gone."""
        if self._lost:
            raise RayLostError(self._lost)

    def check_now(self) -> None:
        """Same as `check`, of this instant."""
        self._look_once()
        self.check()

    def cause_of(self, error: Exception) -> Exception:
        """Cause of the job's end: an error that comes while Ray is gone only follows from that."""
        try:
            self.check_now()
        except RayLostError as lost:
            return error if isinstance(error, RayLostError) else lost
        return error

    @property
    def lost(self) -> bool:
        """Whether no call of Ray's can be relied on to return."""
        return bool(self._lost)

    @contextmanager
    def running(self) -> Iterator[RayWatch]:
        """Look at Ray in a thread of its own, inside."""
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Nobody depends on Ray any more."""
        self._over.set()

    def _look_once(self) -> None:
        with self._lock:
            if not self._lost and not self._over.is_set():
                # What Ray holds of its processes may change while it starts and ends them.
                with suppress(OSError, RuntimeError):
                    self._lost = self._look()

    def _watch(self) -> None:
        while not self._lost:
            if self._over.wait(_POLL_SECONDS):
                return
            self._look_once()
        if not self._over.wait(_END_SECONDS):
            self._on_overdue(self._lost)
