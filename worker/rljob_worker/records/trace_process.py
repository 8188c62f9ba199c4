"""A run's trace, made by a process of its own: the driver's has a run to drive."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rljob_api.wire.names import PRIVATE_VARIABLES
from rljob_worker.errors import JobError, UserError

_SECONDS = 100.0
_SAID = 500
_START = (
    "import os, sys; os.nice(10); from rljob_worker.cli.main import main; "
    "sys.exit(main(['trace', sys.argv[1], '-o', sys.argv[2]]))"
)


class TraceProcess:
    """Makes traces of a run folder, one at a time; thread-safe."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._lock = threading.Lock()

    def packed(self) -> bytes:
        """The trace, packed as `rljob trace` writes it.

        Raises:
            UserError: another one is being made.
            JobError: it cannot be made.
        """
        if not self._lock.acquire(blocking=False):
            raise UserError("a trace is being made; ask again after it")
        try:
            with tempfile.TemporaryDirectory(prefix="rljob-trace-") as name:
                file = Path(name) / "trace.json.gz"
                environment = {key: value for key, value in os.environ.items() if key not in PRIVATE_VARIABLES}
                done = subprocess.run(
                    [sys.executable, "-c", _START, str(self._run_folder), str(file)],
                    capture_output=True,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    timeout=_SECONDS,
                    check=False,
                )
                if done.returncode:
                    raise JobError(f"rljob trace: {done.stderr.decode(errors='replace').strip()[-_SAID:]}")
                return file.read_bytes()
        except subprocess.TimeoutExpired:
            raise JobError(f"rljob trace: not done after {_SECONDS:g} s") from None
        finally:
            self._lock.release()
