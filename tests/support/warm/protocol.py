"""Messages between a test and the server that forks processes for it. Standard library only, and no more than it needs:
each of Ray's workers loads it.

Over a Unix socket: one request with the standard files and, from the server, first the pid and at the end the exit
status, each on a line. Closing the connection kills the process.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from string import Template
from typing import NamedTuple

VARIABLE = "RLJOB_TESTS_WARM"
"""Socket of the server; a driver and its Ray pass the variable on."""
NICENESS = "RLJOB_TESTS_NICENESS"
"""Niceness of the pytest process that asks: the server may be shared by several."""
DRIVER, TRAINER, ENGINE = "driver", "trainer", "engine"
ROLES = (DRIVER, TRAINER, ENGINE)
KEY = "RLJOB_TESTS_KEY"
"""Key of the process from which this one was forked."""
FAULT, PRELOADED = "RLJOB_FAULT", "LD_PRELOAD"
"""Fault that the library of `disk_faults.c` is armed with; the library."""
CENSUS = "RLJOB_TESTS_CENSUS"
"""A folder in which drivers, trainers and engines write what a step goes through (`census`)."""
NPU = "npu"
"""Not of a job: scripts of tests on torch_npu's wheel."""
OPERATOR = "operator"
"""An operator of the tests on a control plane."""
PLAIN = "plain"
"""A process that has imported nothing, for the tests of the forks."""
_PASSED = (
    *("RAY_", "RLJOB_", "PYTEST_", "PATH", "PYTHONPATH", "SPT_NOENV"),
    *("KUBECONFIG", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
"""Beginnings of names of variables that nothing reads while it is imported, or that are seen to after a fork."""
_LENGTH = struct.Struct("!I")
_MOST_FILES = 64


class Request(NamedTuple):
    """A process that is wanted."""

    role: str
    argv: list[str]
    """The script, or the module after `-m`, and its arguments."""
    environment: dict[str, str]
    folder: str
    passed: Sequence[int] = ()
    """Numbers of the files that it gets beside the standard ones; they are sent after those."""
    like: str = ""
    """The key of a process of which it is to be another fork; its environment counts for nothing then."""

    @property
    def kept(self) -> dict[str, str]:
        """Variables that a process must have had from its start. (A driver's reaper ends what carries its mark.)"""
        return {name: value for name, value in self.environment.items() if not name.startswith(_PASSED)}

    @property
    def key(self) -> str:
        """Key that must be the same in the process that is forked."""
        return self.like or json.dumps([self.role, sorted(self.kept.items())])


def send(connection: socket.socket, request: Request, files: Sequence[int]) -> None:
    """Send a request and open files; the caller closes its own."""
    content = json.dumps(request._asdict()).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(content))], list(files))
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Receive what `send` sent. Raises EOFError."""
    head, received, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FILES)
    if len(head) < _LENGTH.size:
        raise EOFError
    (missing,) = _LENGTH.unpack(head)
    content = b""
    while missing > len(content):
        part = connection.recv(missing - len(content))
        if not part:
            raise EOFError
        content += part
    return Request(**json.loads(content)), received


def with_variables(environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """An environment with more variables, in which `$NAME` stands for a variable's value, as Ray does it."""
    result = dict(environment)
    for name, value in more.items():
        result[name] = Template(value).safe_substitute(result)
    return result
