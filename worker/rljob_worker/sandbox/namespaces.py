"""Linux namespaces around the programs of a policy, by bubblewrap. The standard library alone.

bubblewrap gives the fork server user, pid, network, IPC, host name and mount namespaces of its own: a root that can
only be read, with the interpreter, its packages and the system's libraries, without /proc, /sys and any network. Each
program then gets a mount namespace of its own in it, whose work folder is memory with a bound. So a program finds no
file of another, whether the kernel has Landlock or not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob_worker.sandbox.limits import libraries, python_folders, variables

WORK = "/rljob-program"
"""Folder of a program; no prefix of Python lies below it."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ROOT = str(Path(__file__).parents[2])
_UNSHARED = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--die-with-parent", "--new-session", "--hostname", "sandbox",
    # Within its own user namespace alone: to mount a program's folder.
    "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN",
)  # fmt: skip
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_TRY = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rljob_worker.sandbox.namespaces import own_folder; "
    "own_folder(2**20, 10)"
)
_TRY_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def wrapped(command: Sequence[str]) -> list[str]:
    """The command that runs another in namespaces of its own; it needs a Python of this interpreter.

    Raises:
        FileNotFoundError: there is no bubblewrap.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("there is no bwrap on PATH (package bubblewrap)")
    read = dict.fromkeys([*libraries(), *python_folders(), f"{_ROOT}/rljob_worker"])
    bound = [word for path in read if os.path.exists(path) for word in ("--ro-bind", path, path)]
    devices = [word for path in _DEVICES for word in ("--dev-bind", path, path)]
    return [program, *_UNSHARED, *bound, *devices, "--dir", WORK, "--remount-ro", "/", "--chdir", WORK, "--", *command]


def problem() -> str:
    """Why this machine does not give such namespaces to this process; empty: it does."""
    try:
        command = wrapped([sys.executable, "-I", "-S", "-c", _TRY, _ROOT])
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=variables(), timeout=_TRY_SECONDS
        )
    except FileNotFoundError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"bwrap has not started a program within {_TRY_SECONDS:g} s"
    said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else said or f"bwrap ended with exit code {done.returncode}"


def own_folder(size: int, files: int) -> None:
    """Leave this process a mount namespace of its own, whose `WORK` is an empty folder in memory.

    Args:
        size: bytes that it holds.
        files: files and folders that it holds.

    Raises:
        OSError: the kernel refuses it.
    """
    _call(_libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _call(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mounts of its own")
    # The root of it counts as one.
    given = f"size={size},nr_inodes={files + 1},mode=0700".encode()
    _call(_libc.mount(b"tmpfs", WORK.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, given), "a folder in memory")


def _call(result: int, what: str) -> None:
    if result != 0:
        found = ctypes.get_errno()
        raise OSError(found, f"{what}: {os.strerror(found)}")
