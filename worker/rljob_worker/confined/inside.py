"""Replacements for Python inside a confined process, where /dev/shm and Unix sockets are out of reach."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import socket
import sys
from multiprocessing import connection, synchronize
from types import SimpleNamespace
from typing import Any

from rljob_worker.confined.beside import BESIDE_VARIABLE

_SEMAPHORE_BYTES = 64
"""More than a sem_t has."""
_MANY = 1024


def connection_beside() -> socket.socket:
    """The connection to what the keeper started beside this process; nothing that is started here gets it."""
    descriptor = int(os.environ.pop(BESIDE_VARIABLE))
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def adapt() -> None:
    """Make `multiprocessing` of this process work: locks and queues of forked children, and managers.

    Each line that is printed leaves the process at once, as in a terminal; a pipe holds 8 KiB back otherwise.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # A manager listens on a Unix socket otherwise.
    connection.default_family = "AF_INET"  # type: ignore[attr-defined]
    semaphores = _Semaphores(synchronize._multiprocessing.SemLock)  # type: ignore[attr-defined]
    synchronize._multiprocessing = SimpleNamespace(SemLock=semaphores)  # type: ignore[attr-defined]


class _Semaphores:
    """In the place of `_multiprocessing.SemLock`: with semaphores in memory that forked children share.

    Those of the C library are files of /dev/shm, where other processes have theirs.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._rebuild, self.SEM_VALUE_MAX = original._rebuild, original.SEM_VALUE_MAX
        self._memory: list[mmap.mmap] = []
        self._made = 0

    def __call__(self, kind: int, value: int, most: int, name: str, unlink: bool) -> Any:
        if not unlink:
            # Of `spawn` and `forkserver`: children find them by name.
            return self._original(kind, value, most, name, unlink)
        if self._made % _MANY == 0:
            self._memory.append(mmap.mmap(-1, _MANY * _SEMAPHORE_BYTES))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory[-1]))
        address = start + self._made % _MANY * _SEMAPHORE_BYTES
        if ctypes.CDLL(None, use_errno=True).sem_init(ctypes.c_void_p(address), 1, value) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._made += 1
        return self._original._rebuild(address, kind, most, None)
