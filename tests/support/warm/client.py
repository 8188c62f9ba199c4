"""Start a process of a role from a test, and treat it as `subprocess.Popen` would."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from support.warm.protocol import NICENESS, VARIABLE, Request, send

SERVER_SECONDS = 300.0
"""The first process of a role imports what it needs."""


class WarmProcess:
    """A process of a role, in a session of its own. It is killed when the tests are.

    Args:
        role: the modules that it has imported.
        argv: the script, or the module after `-m`, and its arguments.
        environment: its variables.
        output: file of its standard output; None: a pipe, which `communicate` reads.
        errors: file of its standard error; None: where its standard output goes.
        passed: files of this process that it gets too, under the same numbers.
        append: add to the files of its output instead of beginning them anew.
    """

    def __init__(
        self,
        role: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: Path | None = None,
        errors: Path | None = None,
        passed: Sequence[int] = (),
        append: bool = False,
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(server())
        reading, writing = os.pipe()
        request = Request(role, list(argv), {**environment, **variables()}, os.getcwd(), [*passed])
        mode = "ab" if append else "wb"
        with ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "rb"))
            out = writing if output is None else stack.enter_context(open(output, mode)).fileno()
            error = out if errors is None else stack.enter_context(open(errors, mode)).fileno()
            send(self._connection, request, (nothing.fileno(), out, error, *passed))
        os.close(writing)
        self._said = b""
        self.pid = self._number(SERVER_SECONDS)
        self.returncode: int | None = None
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            for line in file:
                self._output.append(line)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
        return self.returncode

    def _number(self, timeout: float | None) -> int:
        """The next one that the server says."""
        while b"\n" not in self._said:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["forked"], timeout or 0.0)
            part = self._connection.recv(64)
            if not part:
                raise RuntimeError(f"the process that forks is gone:\n{_log(server()).read_text()[-2000:]}")
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return int(line)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output, when it and all that hold the pipe have ended. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        self._reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(["forked"], timeout or 0.0)
        return "".join(self._output), None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def variables() -> dict[str, str]:
    """Environment of a process whose trainers and engines are to be forked."""
    return {VARIABLE: server(), NICENESS: str(os.getpriority(os.PRIO_PROCESS, 0))}


def share_server() -> None:
    """Start a server for the pytest processes that this one starts."""
    os.environ[VARIABLE] = server()


@cache
def server() -> str:
    """Socket of the server that this process was given, or of its own, which is started here."""
    if given := os.environ.get(VARIABLE):
        return given
    folder = tempfile.TemporaryDirectory(prefix="rljob-warm-")
    path = str(Path(folder.name) / "socket")
    with open(_log(path), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.read(1) == b".", "the server that forks did not start"

    def end() -> None:
        process.stdin.close()
        process.wait(SERVER_SECONDS)
        folder.cleanup()

    atexit.register(end)
    return path


def _log(path: str) -> Path:
    """Output of a server and of the processes that import for it, beside its socket."""
    return Path(path).with_name("log")
