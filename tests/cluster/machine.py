"""A machine of the tests' own: a network, mounts and processes that all end with its first process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from network import Network, check, die_with_parent, enter_namespace

_CLONE_NEWPID = 0x20000000
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_START_SECONDS = 60.0
_END_SECONDS = 30.0
_FIRST_PROCESS = Path(__file__).with_name("first_process.py")
_libc = ctypes.CDLL(None, use_errno=True)


class Machine(Network):
    """Namespaces for network, mounts and processes; `first_process.py` is process 1 inside.

    The kernel ends every process inside with process 1, and mounts and interfaces with the last of them, containers and
    their shims included. Process 1 ends with this process, unless the machine is `lasting`.

    Args:
        folder: for what programs inside write to /var/lib.
        lasting: outlive this process; `end_machine` with its `pid` ends it.
    """

    def __init__(self, folder: Path, lasting: bool = False) -> None:
        self._folder = folder
        self._lasting = lasting
        # The namespace of new processes belongs to a thread; processes die with the thread that made them.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="machine")
        self._children: list[subprocess.Popen[bytes]] = []
        self._first = self._spawner.submit(self._start_first).result()
        self.pid = self._first.pid
        ready = self._spawner.submit(self._await_first)
        try:
            ready.result(_START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.descriptor = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def spawn(
        self, command: Sequence[str], log: int | IO[bytes], environment: dict[str, str] | None
    ) -> subprocess.Popen[bytes]:
        """Start a program inside; it ends with the machine at the latest."""

        def enter() -> None:
            enter_namespace(self.descriptor)
            enter_namespace(self._mounts)
            if not self._lasting:
                die_with_parent()

        child = self._spawner.submit(lambda: self._popen(command, log, environment, enter)).result()
        self._children.append(child)
        return child

    def close(self) -> None:
        """End every process of the machine and let go of it."""
        self._first.kill()
        # Process 1 stays until all others are gone, and ours only go when we have asked for their exit status.
        for process in (*self._children, self._first):
            process.wait(_END_SECONDS)
        self._spawner.shutdown()
        for descriptor in (getattr(self, "descriptor", -1), getattr(self, "_mounts", -1)):
            if descriptor >= 0:
                os.close(descriptor)

    def _start_first(self) -> subprocess.Popen[bytes]:
        check(_libc.unshare(_CLONE_NEWPID), "make a namespace for processes")

        def enter() -> None:
            check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET), "make namespaces for mounts and network")
            if not self._lasting:
                die_with_parent()

        command = [sys.executable, str(_FIRST_PROCESS), self.ADDRESS, str(self._folder)]
        return self._popen(command, subprocess.PIPE, None, enter)

    def _await_first(self) -> None:
        assert self._first.stdout is not None
        said = self._first.stdout.readline().decode().strip()
        if said != "ready":
            said += self._first.stdout.read().decode()
            raise RuntimeError(f"the machine's first process did not start: {said}")

    def _popen(
        self,
        command: Sequence[str],
        log: int | IO[bytes],
        environment: dict[str, str] | None,
        before: Callable[[], None],
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=self._lasting,
            preexec_fn=before,
        )


def end_machine(pid: int) -> None:
    """End a lasting machine by the id of its first process, and wait until all its processes are gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} is still there after {_END_SECONDS:.0f} s")
        time.sleep(0.05)
