"""One confined process as the driver sees it: started in its bounds, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rljob_worker.confined.bounds import Bounds, explain

_EXIT_SECONDS = 5.0
_STALL_SECONDS = 10
"""Seconds that a process may take over one message: half a message must not hold up the others."""
_MAX_ANSWER_BYTES = 2**26
_READ_BYTES = 65536


class NoMessageError(EOFError):
    """A process sent what is no message: it no longer runs what it was started with, or was never meant to."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of confined processes."""

    workdir: Path
    variables: Mapping[str, str]
    bounds: Bounds


class ConfinedProcess:
    """A process that was given its setup.

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
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALL_SECONDS, 0))
        self.connection = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(self.connection, select.POLLIN)
        with contextlib.suppress(OSError):
            self.connection.send(setup)

    def read(self) -> list[Any]:
        """The next message; EOFError when the process has ended, NoMessageError when it sends something else.

        It is JSON, since control of the process must not give control of the driver.
        """
        try:
            message = json.loads(self._whole_message())
        except OSError as error:
            raise EOFError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise NoMessageError(str(error)) from error
        if not isinstance(message, list) or not message:
            raise NoMessageError("not a list")
        return message

    def _whole_message(self) -> bytes:
        """The connection's `recv_bytes`, within one deadline: its parts may come a byte at a time."""
        until = time.monotonic() + _STALL_SECONDS
        (size,) = struct.unpack("!i", self._part(4, until))
        if not 0 <= size <= _MAX_ANSWER_BYTES:
            raise EOFError(f"a message of {size} bytes")
        return self._part(size, until)

    def _part(self, size: int, until: float) -> bytes:
        part = bytearray()
        while len(part) < size:
            left = until - time.monotonic()
            if left <= 0 or not self._poll.poll(1000 * left):
                raise EOFError(f"a message took longer than {_STALL_SECONDS} s")
            more = os.read(self.connection.fileno(), min(size - len(part), _READ_BYTES))
            if not more:
                raise EOFError("the process has ended")
            part += more
        return bytes(part)

    def has_message(self) -> bool:
        """Whether `read` would not wait: a message, a part of one, or the end is there."""
        return bool(self._poll.poll(0))

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
