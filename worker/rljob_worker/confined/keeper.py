"""A process that keeps one confined process in bounds, and lets nothing of it survive.

It is the confined process's parent, and takes in its orphans (PR_SET_CHILD_SUBREAPER): what is started there stays
below the keeper, whatever session or process group it makes for itself. When the confined process ends, is over a
bound, or the driver closes the pipe on standard input (which the kernel does however the driver ends), all of it is
killed, and its temporary folder removed. It runs without site-packages: `run([BOUNDS, *COMMAND])`, BOUNDS being JSON.

Its exit code is that of the confined process (128 + signal where one ended it), or one of those below.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import resource
import runpy
import select
import signal
import sys
import time
from typing import Any

from rljob_worker.confined import capabilities, landlock, system_calls, usage
from rljob_worker.confined.beside import BESIDE_VARIABLE, NOT_STARTED, Beside, leave_parent, start_beside
from rljob_worker.confined.files import Files, listable, readable, writable
from rljob_worker.host.processes import ProcessIdentity, hide_memory

OVER_MEMORY, OVER_PROCESSES, NO_NETWORK_NAMESPACE, OVER_FILES, HIDDEN, OF_ITS_OWN = 120, 121, 122, 123, 124, 125
"""Exit codes of a keeper; the last one stands for these where the confined process ended by one itself, as Python does
by 120 where its output was closed."""
SCRATCH = "rljob-scratch-"
"""Begins the name of a temporary folder, before the keeper's identity."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_LOOK_SECONDS = 0.25
_HIDDEN_SECONDS = 2.0
_KILL_SECONDS = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def main(bounds: dict[str, Any], command: list[str]) -> int:
    """Run the command within the bounds; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    output, inherited = os.pipe()
    scratch = f"{bounds['temporary']}/{SCRATCH}{ProcessIdentity.own()}.{os.urandom(4).hex()}"
    os.mkdir(scratch, 0o700)
    keeper = os.getpid()
    try:
        # A confined process may make no namespaces, nor may what it starts.
        beside = start_beside(Beside(*bounds["beside"]), inherited, keeper) if bounds["beside"] else None
        child = os.fork()
        if child == 0:
            if beside is not None:
                os.environ[BESIDE_VARIABLE] = str(beside)
            _become(bounds, command, inherited, keeper, scratch)
        if beside is not None:
            os.close(beside)
        hide_memory()
        os.close(inherited)
        # Whatever is inherited belongs to the confined process alone: its end must be seen.
        for descriptor in bounds["descriptors"]:
            os.close(descriptor)
        return _watch(child, bounds, output, woken, scratch)
    finally:
        kill_all_below()
        remove(scratch)


def _become(bounds: dict[str, Any], command: list[str], output: int, keeper: int, scratch: str) -> None:
    """Replace this process by the command."""
    code = NOT_STARTED
    try:
        leave_parent(keeper)
        if not bounds["network"] and not leave_network():
            code = NO_NETWORK_NAMESPACE
            raise OSError(ctypes.get_errno(), "no network namespace")
        for limit, value in (
            (resource.RLIMIT_DATA, bounds["memory"]),
            (resource.RLIMIT_NOFILE, bounds["open_files"]),
            (resource.RLIMIT_FSIZE, bounds["file_bytes"]),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        confine(Files(*bounds["files"]), scratch)
        os.execve(command[0], command, {**os.environ, "TMPDIR": scratch})
    except OSError as error:
        os.write(2, f"confined process: {error}\n".encode())
    finally:
        os._exit(code)


def confine(files: Files, scratch: str) -> None:
    """Give up what this thread could do beyond these files, for good; `no_new_privs` must be set.

    Where the kernel has no Landlock or no filters of system calls, it goes on without: `kernel.lacks` tells.
    """
    if version := landlock.abi():
        landlock.restrict(readable(files), writable(files, scratch), listable(files), version)
    capabilities.drop()
    if system_calls.known():
        system_calls.refuse()


def leave_network() -> bool:
    """Move to a network of one's own, in which there is nothing; False where the kernel does not allow it."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)
    return True


def _watch(child: int, bounds: dict[str, Any], output: int, woken: int, scratch: str) -> int:
    room, shown = bounds["output_bytes"], _Shown(bounds["safe_text"], bounds["source"])
    looks, look = _Looks(bounds, scratch), 0.0
    sources = [0, output, woken]
    while True:
        ready = select.select(sources, [], [], _LOOK_SECONDS)[0]
        if 0 in ready and not os.read(0, 1):
            _end_all(output, room, sources, shown)
            return 0
        if output in ready:
            room = _pass_on(output, room, sources, shown)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        status = _reap(child)
        if status is not None:
            _end_all(output, room, sources, shown)
            code = os.waitstatus_to_exitcode(status)
            if OVER_MEMORY <= code <= OF_ITS_OWN and not (code == NO_NETWORK_NAMESPACE and not bounds["network"]):
                return OF_ITS_OWN
            return code if code >= 0 else 128 - code
        if time.monotonic() >= look:
            if over := looks.over():
                return over
            look = time.monotonic() + _LOOK_SECONDS


class _Looks:
    """Looks at what is below the keeper, one after the other."""

    def __init__(self, bounds: dict[str, Any], scratch: str) -> None:
        self._bounds, self._scratch = bounds, scratch
        self._hidden: dict[int, float] = {}
        """Processes that cannot be measured, and since when: one that starts a program cannot for a moment."""

    def over(self) -> int:
        """The exit code for the bound that is exceeded; 0 where none is."""
        below = usage.descendants()
        if len(below) > self._bounds["processes"]:
            return OVER_PROCESSES
        in_memory, on_disk, entries = usage.folder(self._scratch)
        files = usage.NamelessFiles.of(below)
        if entries > self._bounds["files_made"] or on_disk + sum(files.disk.values()) > self._bounds["scratch_bytes"]:
            return OVER_FILES
        now = time.monotonic()
        self._hidden = {pid: self._hidden.get(pid, now) for pid in files.hidden}
        if any(now - since > _HIDDEN_SECONDS for since in self._hidden.values()):
            return HIDDEN
        return OVER_MEMORY if usage.exceeds(below, self._bounds["memory"], files.memory, in_memory) else 0


class _Shown:
    """Output, written to the driver's own with the characters escaped that a terminal would obey.

    Args:
        module: file of `rljob_api.safe_text`: a script without site-packages cannot import it.
        source: a word that stands before each line.
    """

    def __init__(self, module: str, source: str) -> None:
        self.source = source
        self._visible = runpy.run_path(module)["visible"]
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._within_line = False

    def write(self, printed: bytes) -> None:
        """Write some of it; a character or line may go on in what comes next."""
        text = self._visible(self._decoder.decode(printed))
        if not text:
            return
        whole, end = (text[:-1], "\n") if text.endswith("\n") else (text, "")
        mark = f"{self.source} | "
        marked = ("" if self._within_line else mark) + whole.replace("\n", f"\n{mark}") + end
        self._within_line = not end
        os.write(2, marked.encode("utf-8", "backslashreplace"))


def _pass_on(output: int, room: int, sources: list[int], shown: _Shown) -> int:
    """Give what was printed to the driver's own output, up to a bound; returns what room is left."""
    text = os.read(output, 65536)
    if not text:
        sources.remove(output)
    elif room > 0:
        with contextlib.suppress(OSError):
            shown.write(text[:room])
            if len(text) >= room:
                os.write(2, f"\n{shown.source}: no more of what it prints is shown\n".encode())
    return room - len(text)


def _end_all(output: int, room: int, sources: list[int], shown: _Shown) -> None:
    """Kill all that is below, then pass on what it had printed: only what is dead prints no more."""
    kill_all_below()
    while output in sources and select.select([output], [], [], 0)[0]:
        room = _pass_on(output, room, sources, shown)


def _reap(child: int) -> int | None:
    """Take the exit status of all that ended; that of the child, when it did."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def kill_all_below() -> None:
    """End all processes below this one; orphans of those that were killed come below it too."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (below := usage.descendants()) and time.monotonic() < deadline:
        # Stopped first, so that none has a child while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        _reap(0)
        time.sleep(0.005)
    _reap(0)


def remove(folder: str) -> None:
    """Remove a folder of files that somebody else made, however deep it is and whatever their modes are."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
        return
    # Most folders are empty, and all keepers would wait for it.
    import subprocess

    for program in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(folder):
            subprocess.run([*program, "--", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(arguments: list[str]) -> None:
    """Run as a process: the first argument is the bounds, the others are the command."""
    sys.exit(main(json.loads(arguments[0]), arguments[1:]))
