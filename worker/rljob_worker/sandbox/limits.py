"""Resources of one program. The standard library alone."""

from __future__ import annotations

import os
import resource
import sys
from typing import NamedTuple

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
_RANDOM = ("/dev/random", "/dev/urandom", "/dev/zero")
_DEVICES = ("/dev/null",)
_PYTHON = (sys.prefix, sys.base_prefix, sys.exec_prefix)
OUTPUT_BYTES = 2**20
"""Bytes that a program may print, unless more are expected."""
BESIDE_MEMORY = 2**28
"""Bytes of address space beside `Limits.memory`: the interpreter and its libraries."""


class SandboxError(RuntimeError):
    """No program can be run: the sandbox's fault, or this machine's, and never the program's."""


class ServiceSetup(NamedTuple):
    """Settings of `spec.sandbox.service`."""

    urls: tuple[str, ...]
    concurrency: int
    wait_seconds: float
    """Seconds that the programs of one response may wait for answers, beside the time that they run."""
    program_seconds: float
    """Seconds that they may run, all together."""
    tried: bool = False
    """Whether a program is run at the start."""


class SandboxSetup(NamedTuple):
    """Settings of `spec.sandbox`."""

    memory: int
    """Bytes of a program."""
    seconds: float
    """Seconds of one test."""
    beside: bool = False
    """Whether the keeper has started the server of programs, outside of the scoring process's bounds."""
    service: ServiceSetup | None = None
    """Servers that run them."""


class Limits(NamedTuple):
    """Limits of one process, which has no others."""

    memory: int
    """Bytes of its data; its address space has `BESIDE_MEMORY` more."""
    cpu_seconds: int
    """CPU seconds of all its threads."""
    file_bytes: int = 2**24
    """Size of a file."""
    folder_bytes: int = 2**26
    """Bytes of all its files."""
    files: int = 1000
    """In its folder."""
    open_files: int = 64
    output_bytes: int = OUTPUT_BYTES
    """Bytes of its output, and of one answer."""
    starting_seconds: float = 20.0
    """Until it is confined, before which nothing of the program runs."""

    def apply(self) -> None:
        """Set those that the kernel keeps, for this process."""
        for limit, value in (
            (resource.RLIMIT_DATA, self.memory),
            (resource.RLIMIT_AS, self.memory + BESIDE_MEMORY),
            (resource.RLIMIT_CPU, self.cpu_seconds),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NOFILE, self.open_files),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))


def readable() -> list[str]:
    """Paths that a program may read beside its own folder: system libraries, the interpreter, and its packages."""
    return [*_SYSTEM, *_RANDOM, *dict.fromkeys(map(os.path.realpath, _PYTHON))]


def libraries() -> list[str]:
    """Libraries of the system among them."""
    return list(_SYSTEM)


def python_folders() -> list[str]:
    """Folders of Python, by all the names that they are found under."""
    return list(dict.fromkeys(name for path in _PYTHON for name in (path, os.path.realpath(path))))


def writable(folder: str) -> list[str]:
    """Paths that it may write."""
    return [*_DEVICES, folder]


def variables() -> dict[str, str]:
    """Variables of the process that programs are forked from."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return one | kept | {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
