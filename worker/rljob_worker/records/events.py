"""`events.jsonl`: what the driver was doing when; a killed run's last line names the phase that was alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob_worker.host.files import AppendedFile, WriteFailures, cut_torn_line
from rljob_worker.host.sealed_json import sealed
from rljob_worker.records.event_lines import EVENTS_FILE, read_events

EVENTS = "events"
"""Name in `WriteFailures`."""


class EventLog:
    """Appends one line an event, unbuffered: what was written survives the death of the process. Thread-safe.

    An event that cannot be written waits for the next one.

    Args:
        run_folder: where `events.jsonl` is.
        attempt: of the driver.
        listener: called with the name of each event, those of earlier attempts first.
        failures: where an event that had to wait is noted.
    """

    def __init__(
        self,
        run_folder: Path,
        attempt: int,
        listener: Callable[[str], None] | None = None,
        failures: WriteFailures | None = None,
    ) -> None:
        cut_torn_line(run_folder / EVENTS_FILE)
        self._listener = listener
        if listener is not None:
            for earlier in read_events(run_folder):
                listener(earlier["event"])
        self._file = AppendedFile(run_folder / EVENTS_FILE)
        self._failures = failures or WriteFailures()
        self._lock = threading.RLock()
        self._attempt = attempt
        self.step = 0

    def write(self, event: str, **more: Any) -> None:
        """Append one event."""
        with self._lock:
            line = {"time": time.time(), "attempt": self._attempt, "step": self.step, "event": event, **more}
            try:
                if self._file.full:
                    raise OSError(None, "too many events wait to be written, this one is dropped", str(self._file.path))
                self._file.append((sealed(line) + "\n").encode())
            except OSError as error:
                self._failures.note(EVENTS, error)
            if self._listener is not None:
                self._listener(event)

    def phase(self, name: str, gap: float, **lane: str) -> None:
        """A phase begins, so many seconds after the one before ended; `lane` says in which, where there are several."""
        self.write("phase", phase=name, gap=round(gap, 6), **lane)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
