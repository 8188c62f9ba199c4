"""Landlock: which files a process and all that it starts may read and write; landlock(7).

The standard library alone, since it is imported by a keeper, which runs without site-packages. Beside files the
kernel keeps the process from looking into others (`/proc/PID/environ`, `mem`, `fd`, `root`, ptrace), of any user,
and from ABI 6 on from sending them signals and from their abstract Unix sockets.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on all architectures."""
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
_RIGHTS_SINCE = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV), (9, _RESOLVE_UNIX))
"""ABI, and the rights that came with it."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPES_SINCE, _SCOPES = 6, 0b11
"""Abstract Unix sockets, and signals."""

FILES_SINCE, SIGNALS_SINCE = 1, 6
"""ABIs whose absence in the kernel is reported to the job."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def abi() -> int:
    """Version of the kernel's Landlock; 0 where it has none, or it is switched off."""
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError as error:
        # EPERM: a container's system call filter that does not know it.
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(read: Iterable[str], write: Iterable[str], names: Iterable[str], version: int) -> None:
    """Leave this thread, and what it starts, the named files and what lies below the named folders.

    What is not there is passed over. `no_new_privs` must be set.

    Args:
        read: to be read and executed.
        write: to be read, written, made and removed; devices too.
        names: folders to be listed, with those below them.
        version: the kernel's, at least 1.
    """
    rights = _rights(version)
    handled = _Ruleset(rights, 0, _SCOPES if version >= _SCOPES_SINCE else 0)
    # A kernel without scopes takes the structure without them.
    size = ctypes.sizeof(handled) if version >= _SCOPES_SINCE else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        wholly = rights & ~(_MAKE_CHAR | _MAKE_BLOCK)
        for paths, allowed in ((read, _READ), (write, wholly), (names, _READ_DIR)):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _rights(version: int) -> int:
    return sum(rights for since, rights in _RIGHTS_SINCE if version >= since)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_FILES
        rule = _PathBeneath(allowed, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        found = ctypes.get_errno()
        raise OSError(found, f"Landlock: {os.strerror(found)}")
    return result
