"""A network namespace that has no name and no way out: it lasts as long as this process or one inside it."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TypeVar

from support.ports import free_port

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """One namespace with a loopback interface, which carries the node's address too.

    The kernel removes it with the last process and the last open descriptor, so that nothing is left behind even when
    the tests are killed. `nsenter --net=/proc/PID/ns/net` with the PID of one of its processes looks inside.
    """

    ADDRESS = "10.77.0.1"

    def __init__(self) -> None:
        self.descriptor = _in_thread(_new_namespace)
        for command in (f"addr add {self.ADDRESS}/24 dev lo", "link set lo up"):
            done = self.spawn(["ip", *command.split()], subprocess.DEVNULL, None)
            if done.wait(timeout=60):
                raise RuntimeError(f"`ip {command}` failed inside the network namespace")

    def enter(self) -> None:
        """Move the calling thread into the namespace for good."""
        enter_namespace(self.descriptor)

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in a thread inside the namespace; sockets that it makes stay inside."""

        def inside() -> _T:
            self.enter()
            return function()

        return _in_thread(inside)

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Connect to an address inside the namespace."""
        return self.run(lambda: socket.create_connection((host, port), timeout))

    def listen(self, host: str, port: int = 0) -> socket.socket:
        """Listen on an address inside the namespace; port 0 picks a free one."""
        return self.run(lambda: socket.create_server((host, port), backlog=1024))

    def free_port(self) -> int:
        """A port of the loopback address that nobody listens on."""
        return self.run(free_port)

    def spawn(
        self, command: Sequence[str], log: int | IO[bytes], environment: dict[str, str] | None
    ) -> subprocess.Popen[bytes]:
        """Start a program inside the namespace; it is killed when the calling thread ends."""
        return subprocess.Popen(
            ["nsenter", f"--net=/proc/self/fd/{self.descriptor}", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(self.descriptor,),
            preexec_fn=die_with_parent,
        )

    def close(self) -> None:
        """Let go of the namespace."""
        os.close(self.descriptor)


def _new_namespace() -> int:
    check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread into a namespace for good."""
    check(_libc.setns(descriptor, 0), "enter a namespace")


def die_with_parent() -> None:
    """Have the calling process killed when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def check(result: int, what: str) -> None:
    """Raise the OSError of a C function that has just failed."""
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"Cannot {what}: {os.strerror(error)}")


def _in_thread(function: Callable[[], _T]) -> _T:
    """Run in a thread of its own: namespaces belong to threads, and the caller's must not change."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


if sys.platform != "linux":
    raise ImportError("network namespaces are Linux's")
