"""One confined process as the driver sees it: started in its bounds, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rljob_worker.confined.bounds import Bounds, explain
from rljob_worker.confined.messages import STALL_SECONDS, MessageReader

_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Place of confined processes."""

    workdir: Path
    variables: Mapping[str, str]
    bounds: Bounds


class ConfinedProcess(MessageReader):
    """A process that was given its setup, and its messages.

    Args:
        module: what it runs as `python -m MODULE DESCRIPTOR`; it answers in JSON over the connection there.
        setup: the first thing that is sent to it.
        place: where it runs.
        what: the process in words.
        field: block of the manifest with its bounds.
    """

    def __init__(self, module: str, setup: object, place: Place, *, what: str, field: str) -> None:
        self._bounds, self._what, self._field = place.bounds, what, field
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", module, str(descriptor)]
            path = os.pathsep.join([str(place.workdir), *filter(None, sys.path)])
            self.popen = subprocess.Popen(
                place.bounds.command(command, [descriptor]),
                pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=2,
                cwd=place.workdir, env={**place.variables, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
        self.connection = Connection(ours.detach())
        super().__init__(self.connection)
        with contextlib.suppress(OSError):
            self.connection.send(setup)

    def end(self, seconds: float = _EXIT_SECONDS) -> str:
        """Wait a moment for a process whose connection is closed, end it, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
        self.kill()
        return explain(self.popen.returncode, self._bounds, self._what, self._field)

    def kill(self) -> None:
        """End it and all that it started; idempotent."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(2 * _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.connection.close()
