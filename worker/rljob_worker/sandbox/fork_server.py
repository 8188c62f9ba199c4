"""Forks a process for each program, confines it, and says when it ended: it is a process of its own.

A fork is ready in milliseconds, with all modules that programs need. It never holds anything of a program or of its
tests: what a request brings are descriptors, from which the new process reads what it is to run. So a program finds in
the memory that it inherits nothing of those before it.

A request is one message `{"number", "folder", "limits"}` with four descriptors: the new process's standard input,
output and error, and its channel; with `folder` null it gets one in memory. `{"end": NUMBER}` kills one. The answer is
`{"number", "status"}` when it has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import socket
from typing import Any

from rljob_worker.confined import capabilities, landlock, system_calls
from rljob_worker.sandbox import namespaces, program
from rljob_worker.sandbox.limits import Limits, readable, writable
from rljob_worker.sandbox.testing import warm

_PR_SET_PDEATHSIG = 1
_COMMON = (
    "array", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip
"""Modules that programs import."""
_MAX_REQUEST = 65536
_MAX_DESCRIPTORS = 1024
NAMESPACES = "namespaces"
"""Argument of a server in namespaces, outside of a keeper's confinement."""
CHANNEL = 3
"""Descriptor of a program's channel."""
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> None:
    """Serve until the other end is closed.

    Args:
        arguments: number of the descriptor of requests; `tests` where programs are tested by pytest.
    """
    requests = socket.socket(fileno=int(arguments[0]))
    for module in _COMMON:
        importlib.import_module(module)
    if "tests" in arguments:
        warm()
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready = select.select([requests.fileno(), *running], [], [])[0]
        for descriptor in [one for one in ready if one in running]:
            number, pid = running.pop(descriptor)
            status = os.waitpid(pid, 0)[1]
            os.close(descriptor)
            requests.send(json.dumps({"number": number, "status": status}).encode())
        if requests.fileno() in ready:
            message, given, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 4)
            if not message:
                break
            _serve(json.loads(message), given, running)
    for descriptor in running:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _serve(request: dict[str, Any], given: list[int], running: dict[int, tuple[int, int]]) -> None:
    if "end" in request:
        for descriptor, (number, _) in running.items():
            if number == request["end"]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(request, given, server)
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(program.NOT_CONFINED)
    running[os.pidfd_open(pid)] = request["number"], pid
    for descriptor in given:
        os.close(descriptor)


def _become(request: dict[str, Any], given: list[int], server: int) -> None:
    """Confine this process, then run what its channel says."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        return
    # Moved out of the way first: a number may be that of another's place.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(given)) for descriptor in given]
    for place, descriptor in enumerate(moved):
        os.dup2(descriptor, place)
    os.closerange(CHANNEL + 1, _MAX_DESCRIPTORS)
    limits = Limits(*request["limits"])
    folder = request["folder"] or namespaces.WORK
    if request["folder"] is None:
        namespaces.own_folder(limits.folder_bytes, limits.files)
        capabilities.drop()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    if version := landlock.abi():
        landlock.restrict(readable(), writable(folder), (), version)
    limits.apply()
    if request["folder"] is None:
        system_calls.refuse()
    system_calls.refuse_all_but_threads()
    program.run(CHANNEL)
