"""Forks what multiprocessing would start as a new interpreter: vLLM's workers of an engine that has several.

As a script it is the child of multiprocessing: it requests the fork, and ends with the exit status of the fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

_SPAWNED = "from multiprocessing.spawn import spawn_main"


def spawned_are_forked() -> None:
    """From here on the processes that this one spawns are forks of what it is a fork of."""
    spawn = util.spawnv_passfds

    def spawnv_passfds(path: bytes | str, arguments: Sequence[bytes | str], files: Sequence[int]) -> int:
        program = next((str(one) for one in arguments if str(one).startswith(_SPAWNED)), "")
        if not program:
            return spawn(path, arguments, files)
        return spawn(path, [path, "-I", "-S", __file__, program, *map(str, files)], files)

    util.spawnv_passfds = spawnv_passfds


def main(program: str, *numbers: str) -> None:
    """Stand for a fork that runs a program with these files."""
    from protocol import ENGINE, KEY, VARIABLE, Request, send

    files = [*map(int, numbers)]
    environment = dict(os.environ)
    argv = ["-c", program, "--multiprocessing-fork"]
    request = Request(ENGINE, argv, environment, os.getcwd(), files, environment[KEY])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(environment[VARIABLE])
    send(connection, request, (0, 1, 2, *files))
    for file in files:
        os.close(file)
    said = connection.makefile().read().split()
    code = int(said[1]) if len(said) == 2 else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
