"""From the driver to a tracker's process: what is handed over waits in a bounded queue, and never holds training up."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rljob_api
import rljob_worker
from rljob_api.wire.names import PRIVATE_VARIABLES
from rljob_worker.errors import JobError
from rljob_worker.host.files import read_file, read_text, write_whole
from rljob_worker.host.sealed_json import sealed, unsealed
from rljob_worker.records.trackers.tracker import Opening

logger = logging.getLogger(__name__)

FOLDER = "trackers"
_WAITING = 256
"""Messages that wait for a tracker that is slow or has no network; later ones are dropped, and counted."""
_LOG_CHARACTERS = 2000
_READ_SECONDS = 1.0
"""For the last answers of a process that has ended."""
_OURS = [str(Path(str(package.__file__)).parents[1]) for package in (rljob_worker, rljob_api)]
# Behind the packages of the process's own environment, which may be another one than ours.
_START = (
    "import os, runpy, sys; sys.path += sys.argv.pop(1).split(os.pathsep); "
    "runpy.run_module('rljob_worker.records.trackers.process', run_name='__main__', alter_sys=True)"
)


@dataclass(slots=True)
class Delivery:
    """Delivery of the messages of one tracker: step records and sample tables."""

    name: str
    offered: int = 0
    delivered: int = 0
    failures: int = 0
    """Messages that its package refused."""
    dropped: int = 0
    """Messages that found no room in the queue."""
    finished: bool = False
    """Whether the package said that everything is where it should be."""
    first_failure: str = ""

    def said(self) -> str:
        """One sentence; empty when all is well."""
        missing = self.offered - self.delivered
        if self.finished and not missing:
            return ""
        what = f"{missing} of {self.offered} messages were not delivered" if missing else "it did not finish"
        why = f": {self.first_failure}" if self.first_failure else ""
        return f"tracker {self.name}: {what} ({self.failures} refused, {self.dropped} dropped){why}"


class TrackerFeed:
    """One tracker of a run.

    Args:
        run_folder: where its folder, its id and its log are.
        name: of the tracker.
        opening: without id and folder, which the run folder has.
        seconds: how long the process may take to finish.
        on_event: gets the address of the run.
        python: interpreter that has the package.
    """

    def __init__(
        self,
        run_folder: Path,
        name: str,
        opening: Mapping[str, Any],
        seconds: float,
        on_event: Callable[[str], None],
        python: str = sys.executable,
    ) -> None:
        self.delivery = Delivery(name)
        self._on_event = on_event
        self._seconds = seconds
        self._where = [opening["project"], opening["workspace"], opening["url"], opening["offline"]]
        self._queue: queue.Queue[str | None] = queue.Queue(_WAITING)
        self._id_file = run_folder / FOLDER / f"{name}.json"
        self._log = run_folder / "logs" / f"tracker-{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        folder = run_folder / FOLDER / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log.parent.mkdir(exist_ok=True)
            line = Opening(**opening, folder=str(folder), id=self._known_id()).to_line()
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [python, "-P", "-c", _START, os.pathsep.join(_OURS), name, str(seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={key: value for key, value in os.environ.items() if key not in PRIVATE_VARIABLES},
                    start_new_session=True,
                    text=True,
                )
        except OSError as error:
            self._failed(f"{error.filename or folder}: {error.strerror}")
            self._ended.set()
            return
        self._queue.put(line)
        for run in (self._write, self._read):
            threading.Thread(target=run, name=f"tracker-{name}", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message over; returns at once, whatever becomes of it."""
        self.delivery.offered += 1
        try:
            if self._ended.is_set():
                raise queue.Full
            self._queue.put_nowait(json.dumps(message))
        except queue.Full:
            self.delivery.dropped += 1

    def finish(self, failed: bool) -> None:
        """Ask it to finish; returns at once."""
        self._put_last(json.dumps({"failed": failed}))
        self._put_last(None)

    def close(self, deadline: float) -> Delivery:
        """Wait for its end until `deadline` on the monotonic clock, and end what is left of it then."""
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self._failed("it did not finish in time (finishSeconds, or a stop request's grace period)")
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ended.wait(_READ_SECONDS)
        return self.delivery

    def _put_last(self, line: str | None) -> None:
        while True:
            try:
                return self._queue.put_nowait(line)
            except queue.Full:
                with suppress(queue.Empty):
                    self._queue.get_nowait()
                    self.delivery.dropped += 1

    def _known_id(self) -> str | None:
        try:
            known = unsealed(read_file(self._id_file).decode())
            # One that was opened elsewhere is not found here.
            return str(known["id"]) if known["where"] == self._where else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s: not the id of a run (%s): a new run is opened", self._id_file, error)
            return None

    def _write(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            while (line := self._queue.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "id" in answer:
                self._opened(answer)
            elif "failed" in answer:
                self.delivery.failures += 1
                self._failed(answer["failed"])
            elif "finished" in answer:
                self.delivery.finished = True
            else:
                self.delivery.delivered += 1
        if not self.delivery.finished:
            self._failed(f"its process ended: {self._last_line()}")
        self._ended.set()

    def _opened(self, answer: Mapping[str, str]) -> None:
        self._on_event(f"tracker {self.delivery.name}: {answer['place']}")
        try:
            write_whole(self._id_file, sealed({"id": answer["id"], "where": self._where, "place": answer["place"]}))
        except (OSError, JobError) as error:
            self._failed(f"{self._id_file}: {error}: a restart opens another run")

    def _failed(self, reason: str) -> None:
        if not self.delivery.first_failure:
            self.delivery.first_failure = reason
            logger.warning("tracker %s: %s; training goes on (%s)", self.delivery.name, reason, self._log)

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = read_text(self._log, "replace")[-_LOG_CHARACTERS:].split("\n")
            return next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return "it said nothing"
