"""Program of a confined process: it gets its tasks over its channel, and answers there. The standard library alone.

All of this runs in the same process as the program, which can change it at will: nothing here decides anything.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable

from rljob_worker.sandbox.answering import answer
from rljob_worker.sandbox.channel import FILE, Channel, load
from rljob_worker.sandbox.testing import test

NOT_CONFINED = 127


def run(descriptor: int) -> None:
    """Say that this process is confined, take what it is to run, and run it; does not return."""
    channel = Channel(descriptor)
    channel.send("confined")
    what = channel.receive()
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
    for descriptor_, name in ((1, "stdout"), (2, "stderr")):
        output = io.BufferedWriter(io.FileIO(descriptor_, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(output, encoding="utf-8", errors="backslashreplace"))
    sys.argv[:] = [FILE]
    if what["kind"] == "script":
        os.close(descriptor)
        _end(lambda: load(what["source"], "__main__"))
    elif what["kind"] == "calls":
        _end(lambda: answer(channel, what["source"]))
    else:
        _end(lambda: test(channel, what))


def _end(do: Callable[[], object]) -> None:
    """Do it and end this process as Python ends: threads are waited for, and what was registered is called."""
    code = 0
    try:
        do()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 1
    os._exit(code & 0xFF)
