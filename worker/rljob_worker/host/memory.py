"""The kernel's numbers on host memory: free bytes under every limit, a process's pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = 1 << 60
"""Bytes. cgroup v1 writes a number near 2**63 for no limit."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes that this process could still use, and all there are, under the tightest limit."""

    free: int
    total: int

    @property
    def used(self) -> int:
        """Bytes in use by everybody under that limit."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    limit: str
    usage: str
    reclaimable: str
    """Key in memory.stat: page cache that the kernel drops before it refuses memory."""


_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostMemory:
    """Reads host memory; `root` is where /proc and /sys are looked up."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def info(self) -> MemoryInfo:
        """MemAvailable and MemTotal, or the limit of the tightest memory cgroup (v2 or v1) above this process."""
        fields = dict(line.split(":", 1) for line in self._read("proc/meminfo").splitlines())
        free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        for folder, files in self._limited:
            limit = self._number(folder / files.limit)
            if limit is None:
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / files.usage).read_text()) - int(stat.get(files.reclaimable, 0))
            free, total = min(free, max(limit - used, 0)), min(total, limit)
        return MemoryInfo(free, total)

    @cached_property
    def _limited(self) -> list[tuple[Path, _CgroupFiles]]:
        """Cgroup folders from this process's own up to the root that can hold a limit; limits are read each time."""
        found: dict[Path, _CgroupFiles] = {}
        for line in self._read("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mounts, files = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
            elif "memory" in controllers.split(","):
                mounts, files = ["sys/fs/cgroup/memory"], _V1
            else:
                continue
            for mount in mounts:
                # Inside a container the path may be the host's while the mount starts at the container: the parents
                # that exist count, the mount itself always among them.
                below = Path(path.lstrip("/"))
                for folder in [self._root / mount / part for part in (below, *below.parents)]:
                    if (folder / files.limit).exists() and (folder / files.usage).exists():
                        found[folder] = files
        return list(found.items())

    def _read(self, path: str) -> str:
        return (self._root / path).read_text()

    @staticmethod
    def _number(path: Path) -> int | None:
        text = path.read_text().strip()
        return None if text == "max" or int(text) >= _UNLIMITED else int(text)


def process_resident_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process (default: this one), by /proc/<pid>/statm."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * _PAGE


def resident_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Rss of the mappings that touch the address ranges [start, end), by /proc/self/smaps.

    Takes milliseconds: the kernel walks the page tables of the whole process.
    """
    total = 0
    inside = False
    with open("/proc/self/smaps", "rb") as lines:
        for line in lines:
            key = line.split(None, 1)[0]
            if key == b"Rss:":
                total += int(line.split()[1]) * 1024 if inside else 0
            elif not key.endswith(b":"):
                start, end = (int(part, 16) for part in key.split(b"-"))
                inside = any(start < high and low < end for low, high in ranges)
    return total
