"""Runs programs that a policy wrote, one process each, and takes what they print and answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rljob_worker.confined import usage
from rljob_worker.confined.keeper import remove
from rljob_worker.sandbox import server
from rljob_worker.sandbox.limits import Limits, SandboxError, variables

_READ_BYTES = 65536
_LOOK_SECONDS = 0.1
_END_SECONDS = 20.0
_ERROR_BYTES = 4096
_ANSWER_BYTES = 4096
"""Bytes of an answer of a fork server."""
NOT_CONFINED = "the sandbox cannot confine a process: "


class Sandbox:
    """Starts a process for each program; for one thread. Use as a context manager, or `close()`.

    Args:
        tests: whether programs are tested by pytest.
        requests: to a server that was started by `server.beside`, which then has folders of its own; default: one is
            started.
    """

    def __init__(self, *, tests: bool = False, requests: socket.socket | None = None) -> None:
        self._runs: dict[int, Run] = {}
        self._count = 0
        self._folder: str | None = None
        self._server: subprocess.Popen[bytes] | None = None
        if requests is not None:
            self.requests = requests
            return
        self._folder = tempfile.mkdtemp(prefix="runs-")
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                server.command(theirs.fileno(), tests=tests),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=self._folder, env=variables(),
            )  # fmt: skip

    def begin(self, what: dict[str, Any], limits: Limits, given: bytes = b"") -> Run:
        """Start a program.

        Args:
            what: of `program.run`: its kind, and what that needs.
            limits: of its process.
            given: to its standard input.

        Raises:
            SandboxError: it cannot be started.
        """
        self._count += 1
        folder = None
        if self._folder is not None:
            folder = f"{self._folder}/{self._count}"
            os.mkdir(folder, 0o700)
        pipes = [os.pipe() for _ in range(3)]
        ours, theirs = socket.socketpair()
        request = {"number": self._count, "folder": folder, "limits": list(limits)}
        with theirs:
            child = [pipes[0][0], pipes[1][1], pipes[2][1]]
            try:
                socket.send_fds(self.requests, [json.dumps(request).encode()], [*child, theirs.fileno()])
            except OSError as error:
                raise SandboxError(f"the sandbox's server has ended: {error}") from error
            finally:
                for descriptor in child:
                    os.close(descriptor)
        run = Run(self, self._count, folder, limits, (pipes[0][1], pipes[1][0], pipes[2][0], ours.detach()))
        self._runs[run.number] = run
        run.give(given)
        run.send(what)
        return run

    def take_end(self) -> None:
        """Read the server's next message: a process has ended."""
        try:
            message = self.requests.recv(_ANSWER_BYTES)
        except ConnectionError:
            message = b""
        if not message:
            code = "" if self._server is None else f" with exit code {self._server.wait(_END_SECONDS)}"
            raise SandboxError(f"the sandbox's server died{code}")
        end = json.loads(message)
        if run := self._runs.pop(end["number"], None):
            run.status = end["status"]

    def close(self) -> None:
        """End all processes."""
        self.requests.close()
        if self._server is None or self._folder is None:
            return
        try:
            self._server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        remove(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Run:
    """One program's process. What it prints and answers is kept up to its limits; over one of them it is ended."""

    def __init__(
        self, sandbox: Sandbox, number: int, folder: str | None, limits: Limits, descriptors: tuple[int, int, int, int]
    ) -> None:
        self._sandbox, self.number, self._folder, self.limits = sandbox, number, folder, limits
        self._input, self._output, self._error, self._channel = descriptors
        self._open = set(descriptors)
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        self._to_give = {self._input: bytearray(), self._channel: bytearray()}
        self._received = bytearray()
        self._look = 0.0
        self.lines: list[bytes] = []
        """Lines that came over its channel, but that it is confined."""
        self.printed = bytearray()
        self.printed_errors = bytearray()
        """The end of it."""
        self.over: str | None = None
        """The limit that it was over."""
        self.status: int | None = None
        """Its end, as waitpid(2) says it."""
        self.confined = False
        self.killed = False
        """Whether it had to be."""

    def give(self, given: bytes) -> None:
        """The whole of its standard input."""
        self._to_give[self._input] += given

    def send(self, message: Any) -> None:
        """One message over its channel."""
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Likewise, as it is."""
        self._to_give[self._channel] += line + b"\n"

    def take(self) -> bytes | None:
        """The next line that came."""
        return self.lines.pop(0) if self.lines else None

    @property
    def ended(self) -> bool:
        """Whether its process has ended, or is about to."""
        return self.status is not None or self.over is not None

    def until(self, reached: Callable[[], bool], deadline: float) -> bool:
        """Go on until that, its end, or a time of `time.monotonic()`; whether it was reached."""
        return go_on([self], reached, deadline)

    def finish(self) -> None:
        """Kill its process, wait for its end, and remove its folder; idempotent.

        Raises:
            SandboxError: it was never confined, so nothing of the program ran.
        """
        deadline = time.monotonic() + _END_SECONDS
        if self.status is None:
            self.killed = True
            with contextlib.suppress(OSError):
                self._sandbox.requests.send(json.dumps({"end": self.number}).encode())
        while self.status is None:
            if not select.select([self._sandbox.requests], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SandboxError(f"a process of the sandbox was not killed within {_END_SECONDS:g} s")
            self._sandbox.take_end()
        for descriptor in [self._output, self._error, self._channel]:
            while descriptor in self._open and self._read(descriptor):
                pass
        for descriptor in list(self._open):
            self._close(descriptor)
        if self._folder is not None:
            remove(self._folder)
        if not self.confined:
            raise SandboxError(f"{NOT_CONFINED}{self.last_error()}")

    def last_error(self) -> str:
        """The last line of what it printed as errors, or how it ended."""
        said = bytes(self.printed_errors).decode("utf-8", "replace").strip().rpartition("\n")[2]
        return said or f"it ended with status {self.status}"

    @property
    def out_of_time(self) -> bool:
        """Whether it was killed, or had no more processor time."""
        return self.killed or (self.status is not None and os.WTERMSIG(self.status) == signal.SIGXCPU)

    def waits(self) -> tuple[list[int], list[int]]:
        """Descriptors that are to be read, and to be written."""
        write = [one for one, rest in self._to_give.items() if rest and one in self._open]
        if self._input in self._open and not self._to_give[self._input]:
            self._close(self._input)
        return [one for one in (self._output, self._error, self._channel) if one in self._open], write

    def serve(self, ready: set[int]) -> None:
        """Read and write what is ready, and look at its folder from time to time."""
        for descriptor, rest in self._to_give.items():
            if descriptor in ready and descriptor in self._open and rest:
                self._write(descriptor, rest)
        for descriptor in (self._output, self._error, self._channel):
            if descriptor in ready and descriptor in self._open:
                self._read(descriptor)
        if self._folder is not None and time.monotonic() >= self._look and self.status is None:
            self._look = time.monotonic() + _LOOK_SECONDS
            in_memory, on_disk, files = usage.folder(self._folder)
            if in_memory + on_disk > self.limits.folder_bytes or files > self.limits.files:
                self.over = "files"

    def _write(self, descriptor: int, rest: bytearray) -> None:
        try:
            del rest[: os.write(descriptor, rest[:_READ_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            # It closed its end, and does without.
            rest.clear()
            if descriptor == self._input:
                self._close(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Whether there was something."""
        try:
            text = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            text = b""
        if not text:
            self._close(descriptor)
        elif descriptor == self._channel:
            self._receive(text)
        elif descriptor == self._error:
            self.printed_errors = (self.printed_errors + text)[-_ERROR_BYTES:]
        elif self.over is None:
            self.printed += text
            if len(self.printed) > self.limits.output_bytes:
                self.over = "output"
        return bool(text)

    def _receive(self, text: bytes) -> None:
        if self.over is not None:
            return
        self._received += text
        *lines, self._received = self._received.split(b"\n")
        if lines and not self.confined:
            # The first line is written before anything of the program runs.
            self.confined = lines.pop(0) == b'"confined"'
        self.lines += map(bytes, lines)
        if len(self._received) + sum(map(len, self.lines)) > self.limits.output_bytes:
            self.over = "output"

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)


def go_on(runs: list[Run], reached: Callable[[], bool], deadline: float) -> bool:
    """Let processes of one sandbox go on until that, the end of one of them, or a time; whether it was reached."""
    sandbox = runs[0]._sandbox
    while not reached():
        left = deadline - time.monotonic()
        if left <= 0 or any(run.ended for run in runs):
            return False
        waited = [run.waits() for run in runs]
        read = [sandbox.requests.fileno(), *(one for reads, _ in waited for one in reads)]
        write = [one for _, writes in waited for one in writes]
        ready_read, ready_write, _ = select.select(read, write, [], min(left, _LOOK_SECONDS))
        ready = {*ready_read, *ready_write}
        for run in runs:
            run.serve(ready)
        if sandbox.requests.fileno() in ready:
            sandbox.take_end()
    return True
