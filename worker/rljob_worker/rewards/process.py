"""One scoring process as the driver sees it: started in its bounds, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
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

from rljob_worker.errors import UserError
from rljob_worker.rewards.bounds import Bounds, explain
from rljob_worker.rewards.worker import Setup

START_SECONDS = 120.0
"""A scoring process must have imported its reward by then."""
_EXIT_SECONDS = 5.0
_STALL_SECONDS = 10
"""How long a process may take over one message: half a message must not hold up the others."""
_MAX_ANSWER_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Place:
    """Where scoring processes run."""

    workdir: Path
    variables: Mapping[str, str]
    bounds: Bounds


class ScoringProcess:
    """A process that was given its setup."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self.bounds = place.bounds
        self.start_deadline = time.monotonic() + START_SECONDS
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", "rljob_worker.rewards.worker", str(descriptor)]
            path = os.pathsep.join([str(place.workdir), *filter(None, sys.path)])
            self.popen = subprocess.Popen(
                place.bounds.command(command, [descriptor]),
                pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=2,
                cwd=place.workdir, env={**place.variables, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALL_SECONDS, 0))
        self.connection = Connection(ours.detach())
        with contextlib.suppress(OSError):
            self.connection.send(setup)

    def read(self) -> list[Any]:
        """The next message; EOFError when the process has ended or sends something else.

        It is JSON, since whoever controls the process must not control the driver.
        """
        try:
            message = json.loads(self.connection.recv_bytes(_MAX_ANSWER_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError(str(error)) from error
        if not isinstance(message, list) or not message:
            raise EOFError("not a message")
        return message

    def end(self) -> str:
        """Wait a moment for a process that closed its connection, end it, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_EXIT_SECONDS)
        self.kill()
        return explain(self.popen.returncode, self.bounds)

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


def check_function(setup: Setup, place: Place) -> bool:
    """Import a Python reward in a process of its own, and try whether it takes its arguments; whether it is async.

    Raises:
        UserError: it cannot be used, and why.
    """
    process = ScoringProcess(setup, place)
    try:
        if not process.connection.poll(START_SECONDS):
            raise UserError(f"reward.python: {setup.python!r} does not import within {START_SECONDS:g} s")
        kind, value = process.read()
    except (EOFError, OSError, ValueError):
        raise UserError(f"reward.python: {setup.python!r} does not import: {process.end()}") from None
    finally:
        process.kill()
    if kind != "ready":
        raise UserError(str(value))
    return bool(value)
