"""File systems that fail: a library for LD_PRELOAD, compiled from `disk_faults.c`, and its handle in Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("disk_faults.c")
CHANGES = "open,write,pwrite,fsync,fdatasync,rename,mkdir,unlink,rmdir,flock,truncate,ftruncate"
"""All calls that can be made to fail."""


def library() -> Path:
    """The compiled library; made where it is not there yet."""
    name = f"rljob-disk-faults-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}-{os.getuid()}.so"
    target = Path(tempfile.gettempdir()) / name
    if not target.exists():
        made = target.with_name(f"{name}.{os.getpid()}")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wno-format-truncation", "-o", str(made), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-pthread"], check=True, timeout=60)
        made.replace(target)
    return target


@dataclass(frozen=True)
class Fault:
    """A fault below a folder.

    `nth` counts the listed calls on paths below `prefix` that have `contains` in them, from 1; `number` is the errno;
    `forever`: that call and all after it fail, not it alone; `short`: the first of them writes a half instead.
    """

    prefix: Path
    nth: int
    number: int
    calls: str = CHANGES
    contains: str = ""
    forever: bool = False
    short: bool = False

    def environment(self, marker: Path) -> dict[str, str]:
        """Variables for a program and all that it starts; the process that comes to the call first makes `marker`."""
        parts = [self.prefix, self.calls, self.contains, self.nth, self.number, int(self.forever), int(self.short)]
        return {"LD_PRELOAD": str(library()), "RLJOB_FAULT": ":".join(map(str, [*parts, marker]))}


class Injector:
    """Arms faults in this process, which must have been started with the library preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library()))
        self._library.fault_arm.argtypes = [
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
            *(ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ]
        self._library.fault_disarm.restype = self._library.fault_fired.restype = ctypes.c_long

    def arm(self, fault: Fault) -> None:
        """From now on; nothing below the prefix is really synced to disk, which would take most of the time."""
        self._library.fault_arm(
            *(str(fault.prefix).encode(), fault.calls.encode(), fault.contains.encode()),
            *(fault.nth, fault.number, fault.forever, fault.short, True),
        )

    def disarm(self) -> int:
        """The file system is whole again; how many calls were counted."""
        return int(self._library.fault_disarm())

    @property
    def fired(self) -> int:
        """Number of calls that failed."""
        return int(self._library.fault_fired())
