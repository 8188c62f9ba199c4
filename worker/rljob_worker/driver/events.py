"""`events.jsonl`: what the driver was doing when; a killed run's last line names the phase that was alive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob_worker.host.files import cut_torn_line, write_fully


class EventLog:
    """Appends one line an event, unbuffered: what was written survives the death of the process.

    Args:
        run_folder: where `events.jsonl` is.
        attempt: of the driver.
        listener: called with the name of each event, those of earlier attempts first.
    """

    FILE = "events.jsonl"

    def __init__(self, run_folder: Path, attempt: int, listener: Callable[[str], None] | None = None) -> None:
        cut_torn_line(run_folder / self.FILE)
        self._listener = listener
        if listener is not None and (run_folder / self.FILE).exists():
            for earlier in read_events(run_folder):
                listener(earlier["event"])
        self._file = open(run_folder / self.FILE, "ab", buffering=0)  # noqa: SIM115  (open for the life of the run)
        self._attempt = attempt
        self.step = 0

    def write(self, event: str, **more: Any) -> None:
        """Append one event."""
        line = {"time": time.time(), "attempt": self._attempt, "step": self.step, "event": event, **more}
        write_fully(self._file.fileno(), (json.dumps(line) + "\n").encode())
        if self._listener is not None:
            self._listener(event)

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.write("phase", phase=name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """All complete events of a run."""
    content = (run_folder / EventLog.FILE).read_bytes()
    return [json.loads(line) for line in content.split(b"\n")[:-1]]
