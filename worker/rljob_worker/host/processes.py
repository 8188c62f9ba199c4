"""Processes of this machine, each named for good."""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

_PR_SET_DUMPABLE = 4
_IDENTITY = re.compile(r"(\d+)-(\d+)")


class ProcessIdentity(NamedTuple):
    """One process for good: pids are given out again, and the start time tells two uses of one apart."""

    pid: int
    started: str
    """Clock ticks since boot."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """That of this process."""
        started = start_time(os.getpid())
        assert started is not None
        return cls(os.getpid(), started)

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Parse the `str` of an identity; None for any other text."""
        match = _IDENTITY.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"


def start_time(pid: int) -> str | None:
    """Start of a living process in clock ticks since boot; None when it is gone or a zombie."""
    return _stat(pid)[1]


def living() -> dict[int, tuple[int, str]]:
    """Parent and start time of all processes but this one, by pid."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    stats = {pid: _stat(pid) for pid in pids}
    return {pid: (parent, started) for pid, (parent, started) in stats.items() if started is not None}


def _stat(pid: int) -> tuple[int, str | None]:
    """(parent, start time) of a process, fields 4 and 22 of proc_pid_stat(5); (0, None) when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, None
    return (0, None) if fields[0] in "ZX" else (int(fields[1]), fields[19])


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory, files and first variables (/proc/PID), but for
    those that may trace any; it leaves no core file either. Programs that it starts are not hidden."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
