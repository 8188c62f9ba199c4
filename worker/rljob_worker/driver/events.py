"""`events.jsonl`: what the driver was doing when; a killed run's last line names the phase that was alive."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_worker.host.files import AppendedFile, WriteFailures, cut_torn_line

EVENTS = "events"
"""What `WriteFailures` calls them."""


class EventLog:
    """Appends one line an event, unbuffered: what was written survives the death of the process. Thread-safe.

    An event that cannot be written waits for the next one.

    Args:
        run_folder: where `events.jsonl` is.
        attempt: of the driver.
        listener: called with the name of each event, those of earlier attempts first.
        failures: where an event that had to wait is noted.
    """

    FILE = "events.jsonl"

    def __init__(
        self,
        run_folder: Path,
        attempt: int,
        listener: Callable[[str], None] | None = None,
        failures: WriteFailures | None = None,
    ) -> None:
        cut_torn_line(run_folder / self.FILE)
        self._listener = listener
        if listener is not None and (run_folder / self.FILE).exists():
            for earlier in read_events(run_folder):
                listener(earlier["event"])
        self._file = AppendedFile(run_folder / self.FILE)
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
                self._file.append((json.dumps(line) + "\n").encode())
            except OSError as error:
                self._failures.note(EVENTS, error)
            if self._listener is not None:
                self._listener(event)

    def phase(self, name: str, **lane: str) -> None:
        """A phase begins; `lane` says in which, where there are several."""
        self.write("phase", phase=name, **lane)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """All complete events of a run; lines that are none, which a lost disk may leave, are passed over."""
    content = (run_folder / EventLog.FILE).read_bytes()
    return [event for line in content.split(b"\n")[:-1] if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        content = json.loads(line)
        if isinstance(content, dict) and isinstance(content.get("event"), str):
            return content
    return None
