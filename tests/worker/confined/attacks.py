"""Attacks of a confined process on its parent's parent, and what must work nevertheless; prints the outcomes as JSON.

    python attacks.py PID FOLDER

PID is a process of the same user with a secret among its variables; FOLDER holds a file `secret` that nobody allowed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
VICTIM, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
PTRACE_SEIZE = 0x4206


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def secret_of(pid: int) -> None:
    assert b"SECRET" in Path(f"/proc/{pid}/environ").read_bytes()


def has_capabilities(pid: str) -> bool:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return any(line.startswith("CapPrm:") and int(line.split()[1], 16) for line in status.splitlines())
    return False


def secret_anywhere(of: Callable[[str], bool] = lambda pid: True) -> None:
    found = []
    for pid in filter(of, filter(str.isdigit, os.listdir("/proc"))):
        for read in (
            lambda pid: b"SECRET" in Path(f"/proc/{pid}/environ").read_bytes(),
            lambda pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)) is None,
            lambda pid: os.readlink(f"/proc/{pid}/root") and os.listdir(f"/proc/{pid}/cwd") is not None,
            lambda pid: bool(Path(f"/proc/{pid}/maps").read_bytes()),
            lambda pid: any(os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()),
        ):
            try:
                if int(pid) != os.getpid() and read(pid):
                    found.append(pid)
            except OSError:
                continue
    assert found, "nothing"


def use_temporary_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script")
        script.write_text("#!/bin/sh\necho done")
        script.chmod(0o700)
        script.rename(Path(folder, "moved"))
        assert subprocess.run([Path(folder, "moved")], capture_output=True).stdout == b"done\n"


def use_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def write_into(folder: str) -> None:
    file = Path(folder, f"attack-{os.getpid()}")
    file.write_text("x")
    file.unlink()


NUMBERS = {
    "x86_64": {"io_uring_setup": 425, "bpf": 321, "userfaultfd": 323, "add_key": 248, "mq_open": 240, "semget": 64},
    "aarch64": {"io_uring_setup": 425, "bpf": 280, "userfaultfd": 282, "add_key": 217, "mq_open": 180, "semget": 190},
}[os.uname().machine]


def refused(name: str, *arguments: Any) -> None:
    """EINVAL and others would come from the call itself: it was made."""
    if libc.syscall(NUMBERS[name], *arguments) == -1 and ctypes.get_errno() == errno.EPERM:
        raise PermissionError(name)


def enter_network() -> None:
    call("setns", os.open(f"/proc/{VICTIM}/ns/net", os.O_RDONLY), 0x40000000)


REFUSED: dict[str, Callable[[], object]] = {
    "a secret in any process": secret_anywhere,
    "a secret in a process with capabilities": lambda: secret_anywhere(has_capabilities),
    "environ": lambda: secret_of(VICTIM),
    "mem": lambda: os.open(f"/proc/{VICTIM}/mem", os.O_RDONLY),
    "files through root": lambda: os.listdir(f"/proc/{VICTIM}/root/tmp"),
    "ptrace": lambda: call("ptrace", PTRACE_SEIZE, VICTIM, 0, 0),
    "setns": enter_network,
    "unshare": lambda: call("unshare", 0x10000000),
    "its limits": lambda: resource.prlimit(VICTIM, resource.RLIMIT_CORE),
    "its cores": lambda: os.sched_setaffinity(VICTIM, {0}),
    "its priority": lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19),
    "System V memory": lambda: call("shmget", 0, 4096, 0o1600),
    "System V semaphores": lambda: refused("semget", 0, 1, 0o1600),
    "POSIX queue": lambda: refused("mq_open", b"attack", os.O_RDWR | os.O_CREAT, 0o600, None),
    "io_uring": lambda: refused("io_uring_setup", 1, None),
    "bpf": lambda: refused("bpf", 0, None, 0),
    "userfaultfd": lambda: refused("userfaultfd", 1),
    "keyring": lambda: refused("add_key", b"user", b"attack", b"x", 1, -3),
    "Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM),
    "vsock": lambda: socket.socket(socket.AF_VSOCK),
    "undumpable": lambda: call("prctl", 4, 0, 0, 0, 0),
    "capability": lambda: os.chroot("/"),
}
REFUSED_BY_LANDLOCK: dict[str, Callable[[], object]] = {
    "signal": lambda: os.kill(VICTIM, 0),
    "signal to the keeper": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "file": lambda: (FOLDER / "secret").read_text(),
    "hidden file": lambda: (FOLDER / "code" / ".env").read_text(),
    "write beside": lambda: (FOLDER / "code" / "made").write_text("x"),
    "truncate": lambda: os.truncate(FOLDER / "code" / "data", 0),
    "remove": lambda: (FOLDER / "code" / "other").unlink(),
    "/dev/shm": lambda: write_into("/dev/shm"),
    "/dev/shm of others": lambda: os.listdir("/dev/shm"),
    "/tmp": lambda: write_into("/tmp"),
    "/etc/shadow": lambda: Path("/etc/shadow").read_text(),
    "terminal": lambda: os.open("/dev/pts/ptmx", os.O_WRONLY),
}
ALLOWED: dict[str, Callable[[], object]] = {
    "data beside": lambda: (FOLDER / "code" / "data").read_text(),
    "names in a folder that hides something": lambda: os.listdir(FOLDER / "code"),
    "named folder": lambda: (FOLDER / "read" / "data").read_text(),
    "written folder": lambda: (FOLDER / "write" / "made").write_text("x"),
    "temporary folder": use_temporary_folder,
    "thread": use_thread,
    "program": lambda: subprocess.run(["/bin/true"], check=True),
    "socket pair": socket.socketpair,
    "name": lambda: socket.getaddrinfo("localhost", 80),
    "random": lambda: os.urandom(8),
    "own variables": lambda: Path("/proc/self/environ").read_bytes(),
    "child's signal": lambda: subprocess.Popen(["/bin/sleep", "100"]).kill(),
}


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (OSError, AssertionError, subprocess.CalledProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    groups = {"refused": REFUSED, "landlock": REFUSED_BY_LANDLOCK, "allowed": ALLOWED}
    print(json.dumps({name: {key: outcome(try_) for key, try_ in group.items()} for name, group in groups.items()}))
