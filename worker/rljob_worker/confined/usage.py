"""Memory and files that confined processes hold; the standard library alone."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from functools import cache

_IN_MEMORY = (" - tmpfs ", " - ramfs ", " - hugetlbfs ", " - devtmpfs ")
_ANONYMOUS_FILE = "/memfd:"
_BLOCK = 512
_MOST_ENTRIES = 200_000
"""Most entries of a folder that are counted."""

File = tuple[int, int]
"""Device and inode."""


def descendants() -> list[int]:
    """All processes below this one."""
    found: list[int] = []
    new = [os.getpid()]
    while new:
        new = [child for parent in new for child in _children(parent)]
        found += new
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def exceeds(pids: list[int], limit: int, files: dict[File, int], beside: int) -> bool:
    """Whether processes hold more memory than that: their own, shared, and that of files which are nothing but memory.

    Args:
        pids: the processes.
        limit: bytes.
        files: their nameless files in memory.
        beside: bytes of files in memory that have a name.
    """
    held = sum(files.values()) + beside
    # What is shared, after a fork or with a file above, counts in each of them: exact figures take longer.
    if sum(map(_memory, pids)) + held <= limit:
        return False
    # One that ends between two readings is found with its memory and without its files: what is over stays over.
    return all(sum(_own_share(pid) - _mapped_of(pid, files) for pid in pids) + held > limit for _ in range(2))


def folder(path: str) -> tuple[int, int, int]:
    """Usage of a folder: bytes in memory and on a disk, and the number of files; cut off at `_MOST_ENTRIES`."""
    used, entries = 0, 0
    folders = [path]
    while folders and entries <= _MOST_ENTRIES:
        # What is being removed meanwhile, or is nested too deep for a path, is not counted.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                entries += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
    if not entries:
        return 0, 0, 0
    try:
        in_memory = os.stat(path).st_dev in _memory_devices()
    except OSError:
        return 0, 0, 0
    return (used, 0, entries) if in_memory else (0, used, entries)


class NamelessFiles:
    """Open files without a name."""

    def __init__(self) -> None:
        self.memory: dict[File, int] = {}
        """Bytes of those in memory."""
        self.disk: dict[File, int] = {}
        """Bytes of those on a disk."""
        self.hidden: set[int] = set()
        """Processes whose files cannot be seen."""

    @classmethod
    def of(cls, pids: Iterable[int]) -> NamelessFiles:
        """Nameless files of some processes."""
        found = cls()
        for pid in pids:
            try:
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        found._add(f"/proc/{pid}/fd/{name}")
            except (FileNotFoundError, ProcessLookupError):
                continue
            except PermissionError:
                # One that is ending has no memory, and its files belong to root.
                if _sum_of(f"/proc/{pid}/status", ("VmSize:",)):
                    found.hidden.add(pid)
        return found

    def _add(self, path: str) -> None:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and not found.st_nlink:
            in_memory = found.st_dev in _memory_devices() or os.readlink(path).startswith(_ANONYMOUS_FILE)
            files = self.memory if in_memory else self.disk
            files[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK


@cache
def _memory_devices() -> frozenset[int]:
    """Devices whose files are memory, but those that have no mount of their own."""
    devices = set()
    with open("/proc/self/mountinfo", errors="replace") as file:
        for line in file:
            if any(kind in line for kind in _IN_MEMORY):
                major, minor = line.split()[2].split(":")
                devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)


def _memory(pid: int) -> int:
    """Bytes of anonymous and shared memory that a process has, not of the files that it maps."""
    return _sum_of(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:"))


def _own_share(pid: int) -> int:
    """The same, each page divided by the number of processes that have it."""
    return _sum_of(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))


def _sum_of(path: str, names: tuple[str, ...]) -> int:
    total = 0
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        for line in file:
            if line.startswith(names):
                total += int(line.split()[1]) * 1024
    return total


def _mapped_of(pid: int, files: dict[File, int]) -> int:
    """Bytes of a process's share that belong to these files."""
    if not files:
        return 0
    total, counts = 0, False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", errors="replace") as smaps:
        for line in smaps:
            words = line.split()
            if "-" in words[0] and len(words) >= 5:
                major, minor = words[3].split(":")
                counts = (os.makedev(int(major, 16), int(minor, 16)), int(words[4])) in files
            elif counts and words[0] == "Pss:":
                total += int(words[1]) * 1024
    return total
