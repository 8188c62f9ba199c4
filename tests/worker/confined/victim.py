"""A process with a secret that starts a confined one: `python victim.py USER ABI ROOT BOUNDS PROGRAM ARGUMENTS`.

USER: `root` as it is; `user` for another user; `pod` for another user as in a pod with the runtime's default
profile. ABI: of Landlock, at most the kernel's. It becomes that first, and runs itself again: a change of user hides
a process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

NOBODY = 1234
libc = ctypes.CDLL(None, use_errno=True)


def become_another(home: str) -> None:
    """In a copy of the file system where that user reaches the interpreter."""
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    if libc.mount(home.encode(), b"/mnt", None, 0x1000, None):
        raise OSError(ctypes.get_errno(), "cannot mount the interpreter")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def main() -> int:
    who, abi, root, bounds, *command = sys.argv[1:]
    sys.path.insert(0, root)
    from rljob_worker.confined import capabilities, system_calls

    interpreter = sys.executable
    if "SECRET_TOKEN" not in os.environ:
        if who != "root":
            relative = Path(sys.executable).resolve().relative_to(sys.base_prefix)
            become_another(sys.base_prefix)
            interpreter = f"/mnt/{relative}"
        if who == "pod":
            libc.prctl(38, 1, 0, 0, 0)
            capabilities.drop()
            system_calls.refuse()
        os.execve(interpreter, [interpreter, "-I", "-S", *sys.argv], {"PATH": os.defpath, "SECRET_TOKEN": "SECRET"})
    if "namespaces" in command:
        # Without `site`, it is that of the interpreter alone.
        sys.prefix = str(Path(sys.executable).parents[1])
        from rljob_worker.sandbox.server import beside

        server = beside(tests=False)
        start = "main(sys.argv[2:])"
        assert sum(start in word for word in server.command) == 1
        older = f"from rljob_worker.confined import landlock as l; abi = l.abi(); l.abi = lambda: min(abi, {abi}); "
        words = [word.replace(start, older + start) for word in server.command]
        bounds = json.dumps(json.loads(bounds) | {"beside": server._replace(command=words)})
    program = "import sys; sys.path.insert(0, sys.argv[1]); from rljob_worker.confined import keeper, landlock; "
    program += f"abi = landlock.abi(); landlock.abi = lambda: min(abi, {abi}); keeper.run(sys.argv[2:])"
    keeper = [interpreter, "-I", "-S", "-c", program, root, bounds, interpreter, "-I", "-S", command[0]]
    read, hold = os.pipe()
    pid = str(os.getpid())
    return subprocess.run(
        [*keeper, pid, *command[1:]], stdin=read, env={"PATH": os.defpath}, pass_fds=[hold]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
