"""Whether two processes can share memory: the mapped files in /dev/shm that weights, vLLM and HCCL's counters use."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path

from rljob_worker.doctor.programs import last_line

_BYTES = 1 << 20
_SECONDS = 30.0


def shared_memory_problem(folder: Path) -> str:
    """Why a child process does not see what this one writes into a mapping, and the other way round; empty: it does."""
    path = folder / f"rljob-doctor-{os.getpid()}"
    try:
        with path.open("xb+") as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)
            with mmap.mmap(file.fileno(), _BYTES) as view:
                view[:] = os.urandom(_BYTES)
                return _ask_peer(path, view)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    finally:
        path.unlink(missing_ok=True)


def _ask_peer(path: Path, view: mmap.mmap) -> str:
    wanted = hashlib.sha256(view).hexdigest()
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(path)], capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"the second process gave no answer within {_SECONDS:g} s"
    if done.returncode:
        return f"the second process failed: {last_line(done.stderr.decode(errors='replace'))}"
    if done.stdout.decode().strip() != wanted:
        return "the second process read other bytes than this one wrote"
    return "" if view[:8] == b"answered" else "this process does not see what the second one wrote"


def main() -> None:
    """The second process: print the digest of what it sees, then write an answer."""
    with open(sys.argv[1], "rb+") as file, mmap.mmap(file.fileno(), 0) as view:
        print(hashlib.sha256(view).hexdigest())
        view[:8] = b"answered"


if __name__ == "__main__":
    main()
