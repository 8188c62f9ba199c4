"""A process that a keeper starts beside the confined one, outside of its confinement. The standard library alone."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from collections.abc import Sequence
from typing import NamedTuple

NOT_STARTED = 127
BESIDE_DESCRIPTOR, BESIDE_VARIABLE = 3, "RLJOB_BESIDE"
"""Descriptor of its end of the sockets, and the variable that tells the confined process the number of its own."""
_MAX_DESCRIPTORS = 1024
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_libc = ctypes.CDLL(None, use_errno=True)


class Beside(NamedTuple):
    """A process that is started beside the confined one: trusted code, which confines what it starts itself.

    It gets one end of a pair of sockets as `BESIDE_DESCRIPTOR`, the confined process the other.
    """

    command: Sequence[str]
    variables: Sequence[tuple[str, str]]


def start_beside(beside: Beside, output: int, keeper: int) -> int:
    """Start one.

    Args:
        beside: its command.
        output: descriptor that it prints to.
        keeper: pid of this process.

    Returns:
        Descriptor of the confined process's end of their sockets, which it inherits.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            leave_parent(keeper)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.dup2(theirs.fileno(), BESIDE_DESCRIPTOR)
            os.closerange(BESIDE_DESCRIPTOR + 1, _MAX_DESCRIPTORS)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.execve(beside.command[0], list(beside.command), dict(beside.variables))
        except OSError as error:
            os.write(2, f"beside the confined process: {error}\n".encode())
        finally:
            os._exit(NOT_STARTED)
    theirs.close()
    ours.set_inheritable(True)
    return ours.detach()


def leave_parent(keeper: int) -> None:
    """Make this a session of its own that ends with the keeper, without its rights and its handlers of signals."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(NOT_STARTED)
    # A program of another user's rights could not be killed.
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
