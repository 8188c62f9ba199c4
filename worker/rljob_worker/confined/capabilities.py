"""Capabilities, which let a process exceed its user's rights, given up for good: capabilities(7).

Root without capabilities is an ordinary user: it cannot look into a process that has some, nor enter its namespaces.
"""

from __future__ import annotations

import ctypes
import os

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT = 23, 24, 28, 47
_AMBIENT_CLEAR_ALL = 4
_NO_ROOT = 0b11
"""SECBIT_NOROOT with its lock: a program that root runs gets none for that."""
_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def drop() -> None:
    """Give up all capabilities; `no_new_privs` must be set, so that no program gives any back.

    Raises:
        OSError: some are left.
    """
    # These need a capability themselves; without it `no_new_privs` does what they do.
    for number in range(64):
        if _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _libc.prctl(_PR_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, nothing = _Header(_VERSION, 0), (_Data * 2)()
    if _libc.capset(ctypes.byref(header), nothing) != 0:
        found = ctypes.get_errno()
        raise OSError(found, f"capabilities: {os.strerror(found)}")
