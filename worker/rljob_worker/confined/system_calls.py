"""System calls that confined code is refused: seccomp(2). The standard library alone, as `landlock`.

All others are allowed, as scores are made by whatever people install. Refused are those that reach other processes
without a file (ptrace, io_uring, which makes sockets beyond any filter, other processes' limits), that make
namespaces with capabilities in them or leave those that were made, that keep memory after their process (System V
and POSIX queues and segments), kernel keyrings, and sockets but those of the internet: a Unix socket's path is
nothing that Landlock covered before ABI 9, and those of Ray, of a container runtime and of a desktop trust every
process that may open them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""BPF: load a word, jump if equal, if a bit is set, if greater or equal; return."""
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
"""Bit of the x86-64 calls of another ABI, which have numbers of their own."""
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH, and the column below."""
_REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _PRCTL = (56, 220), (435, 435), (41, 198), (157, 167)
_PR_SET_DUMPABLE = 4
"""It would hide a process from its keeper too."""
_OF_ITSELF_ALONE = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "setpriority": (141, 140)}
"""Calls whose first argument is 0 where a process means itself; setpriority's second is asked too."""
_INTERNET = (2, 10, 16)
"""AF_INET, AF_INET6, and AF_NETLINK, which name resolution asks for the machine's addresses."""

_OF_MORE_THAN_ITSELF = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198),
    "memfd_create": (319, 279), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
"""System calls that a program has no need of when it is one process, and answers over what it was given."""
_CLONE_THREAD = 0x10000
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
_OWNERS = {"fcntl": ((72, 25), (8, 15)), "ioctl": ((16, 29), (0x8901, 0x8902))}
"""Commands that name a process to which the kernel sends a signal: F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def known() -> bool:
    """Whether the kernel takes such filters, and its calls are known here."""
    if os.uname().machine not in _ARCHITECTURES:
        return False
    _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def refuse() -> None:
    """Refuse them to this thread and all that it starts; `no_new_privs` must be set.

    Raises:
        OSError: the kernel does not take the filter.
    """
    _load(_program(*_ARCHITECTURES[os.uname().machine]))


def refuse_all_but_threads() -> None:
    """Refuse this process, beside what `refuse` does, all that reaches beyond it: it stays one process, with threads.

    Refused are further processes and programs, sockets but pairs, nameless memory, and signals to others.

    Raises:
        OSError: the kernel does not take the filter.
    """
    _load(_one_process(*_ARCHITECTURES[os.uname().machine], os.getpid()))


def _load(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        found = ctypes.get_errno()
        raise OSError(found, f"seccomp: {os.strerror(found)}")


def _beginning(architecture: int) -> list[bytes]:
    """Calls of other architectures and ABIs are refused; then the call's number is loaded."""
    return [
        _line(_LOAD, _ARCH_AT),
        _line(_EQUAL, architecture, 1, 0),
        _returned(errno.ENOSYS),
        _line(_LOAD, _NUMBER_AT),
        _line(_AT_LEAST, _X32, 0, 1),
        _returned(errno.ENOSYS),
    ]


def _one_process(architecture: int, column: int, pid: int) -> bytes:
    lines = _beginning(architecture)
    # glibc goes back to clone, whose flags a filter sees.
    lines += _if_number(_CLONE3[column], _returned(errno.ENOSYS))
    for numbers in _OF_MORE_THAN_ITSELF.values():
        if (number := numbers[column]) is not None:
            lines += _if_number(number, _returned(errno.EPERM))
    thread = _argument(0, _line(_ANY_BIT, _CLONE_THREAD, 1, 0), _returned(errno.EPERM))
    lines += _if_number(_CLONE[column], *thread)
    for numbers_ in _SIGNALS.values():
        own = _argument(0, _line(_EQUAL, pid, 1, 0), _returned(errno.EPERM))
        lines += _if_number(numbers_[column], *own)
    for columns, commands in _OWNERS.values():
        for command in commands:
            other = _argument(1, _line(_EQUAL, command, 0, 1), _returned(errno.EPERM))
            lines += _if_number(columns[column], *other)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _program(architecture: int, column: int) -> bytes:
    """The filter's instructions; what is tested jumps over one return at most."""
    lines = _beginning(architecture)
    # glibc goes back to clone, whose flags a filter sees.
    lines += _if_number(_CLONE3[column], _returned(errno.ENOSYS))
    for numbers in _REFUSED.values():
        lines += _if_number(numbers[column], _returned(errno.EPERM))
    lines += _if_number(_CLONE[column], *_argument(0, _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _returned(errno.EPERM)))
    for name, numbers in _OF_ITSELF_ALONE.items():
        asked = (0, 1) if name == "setpriority" else (0,)
        for argument in asked:
            own = _argument(argument, _line(_EQUAL, 0, 1, 0), _returned(errno.EPERM))
            lines += _if_number(numbers[column], *own)
    undumpable = _argument(0, _line(_EQUAL, _PR_SET_DUMPABLE, 0, 1), _returned(errno.EPERM))
    lines += _if_number(_PRCTL[column], *undumpable)
    internet = [_line(_EQUAL, family, len(_INTERNET) - place, 0) for place, family in enumerate(_INTERNET)]
    lines += _if_number(_SOCKET[column], *_argument(0, *internet, _returned(errno.EPERM)))
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _if_number(number: int, *then: bytes) -> list[bytes]:
    """Instructions for one call; the call's number is loaded before and after."""
    return [_line(_EQUAL, number, 0, len(then)), *then]


def _argument(index: int, *then: bytes) -> list[bytes]:
    """Instructions about the low word of an argument; the number is loaded again behind them."""
    return [_line(_LOAD, _ARGUMENTS_AT + 8 * index), *then, _line(_LOAD, _NUMBER_AT)]


def _returned(number: int) -> bytes:
    return _line(_RETURN, _ERRNO | number)


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
