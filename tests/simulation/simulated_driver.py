"""A driver as the operator and the disk see it: the real run folder, records, checkpoints, recovery and HTTP answers.

What stands in are the trainers: their state is a number that each step makes of the one before it, so that a run which
does not continue exactly is seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import xxhash

from rljob_api import RLJob
from rljob_api.wire.driver_status import DriverStatus
from rljob_worker.checkpoints.recovery import Recovery
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.flow.pool import PoolState
from rljob_worker.host.files import WriteFailures, sync_file
from rljob_worker.phases import PhaseClock
from rljob_worker.records.events import EventLog
from rljob_worker.records.http import _Handler
from rljob_worker.records.steps import StepLog
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rollouts.step import Progress
from rljob_worker.trainer.checked_file import CheckedFile, damage

RANK_FILE = "rank-0"
_TOKEN = "of the driver"


def weights_after(step: int) -> str:
    """The weights after so many steps, from any driver."""
    state = "begin"
    for number in range(step):
        state = hashlib.sha256(f"{state} {number}".encode()).hexdigest()
    return state


class Trainers:
    """One trainer, whose weights are a text."""

    def __init__(self) -> None:
        self.weights = weights_after(0)

    def __len__(self) -> int:
        return 1

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method as on a group of processes."""
        return getattr(self, method.__name__)(*arguments)

    def step(self, number: int) -> None:
        self.weights = hashlib.sha256(f"{self.weights} {number}".encode()).hexdigest()

    def save(self, folder: str) -> list[list[CheckedFile]]:
        content = self.weights.encode()
        with open(Path(folder) / RANK_FILE, "wb") as file:
            file.write(content)
            sync_file(file)
        return [[CheckedFile(RANK_FILE, len(content), xxhash.xxh3_64(content).hexdigest())]]

    def load(self, folder: str) -> list[str]:
        self.weights = (Path(folder) / RANK_FILE).read_text()
        return [""]

    def damage(self, folder: str, files: Sequence[CheckedFile]) -> list[str]:
        return [damage(folder, file) for file in files]


class Driver:
    """One process, from its start on; a call to the disk may end it with `Killed`.

    Args:
        place: the run folder.
        job: the manifest that it was submitted with.
        now: seconds.
    """

    def __init__(self, place: Path, job: RLJob, now: Any) -> None:
        self.spec = job.spec
        self.committed: list[int] = []
        """Steps whose checkpoint was reported to be there."""
        self.folder = RunFolder(place, job, resume="auto")
        self.log = StepLog(self.folder.path, WriteFailures(), self.folder.check)
        self.events = EventLog(self.folder.path, self.folder.attempt)
        self.clock = PhaseClock(now)
        self.progress = Progress()
        self.trainers = Trainers()
        self.records = RecordWriter(self.folder.path, self.log, self.folder.attempt, [])
        self.recovery = Recovery(
            job.spec,
            cast("Any", self.trainers),
            cast("Any", _CALLS),
            self.clock,
            self.folder.checkpoints(),
            self.records,
            cast("Any", SimpleNamespace(restore=lambda *_, **__: None, saved=PoolState({}), mended=())),
            self.progress,
            self.folder.attempt,
            self.events,
        )
        unrecorded = self.recovery.restore_latest()
        assert self.trainers.weights == weights_after(self.progress.step), "it went on from other weights"
        if unrecorded is not None:
            self.records.recover(unrecorded, {})
        self.clock.restart()
        self._served = SimpleNamespace(log=self.log, status=self.status, last_read=-1)
        self._server = SimpleNamespace(driver=self._served, token=_TOKEN, local=False)
        self._now, self.done_at = now, now()

    @property
    def done(self) -> bool:
        return self.progress.step >= self.spec.steps

    @property
    def all_read(self) -> bool:
        """Whether the operator has asked for the last record."""
        return bool(self._served.last_read >= len(self.log) - 1)

    def step(self) -> None:
        """Train a step, save when it is due, write its record: in the order of `driver/loops/colocated.py`."""
        self.trainers.step(self.progress.step)
        self.progress.step += 1
        self.progress.weight_version += 1
        if self.recovery.due_checkpoint():
            self.save()
        self.records.write(self.progress.step, self.clock.end_step())
        self.recovery.recorded_step = self.progress.step
        self.done_at = self._now()

    def save(self) -> None:
        """Save the last completed step, unless it is saved."""
        if self.recovery.save_before_leaving() is not None:
            self.committed.append(self.progress.step)

    def leave(self) -> None:
        """Leave as on SIGTERM."""
        self.save()
        self.log.close()
        self.folder.close()

    def status(self) -> DriverStatus:
        phase, seconds = self.clock.running()
        return DriverStatus(
            ready=True,
            step=self.progress.step,
            steps=self.spec.steps,
            phase=phase,
            attempt=self.folder.attempt,
            weight_version=self.progress.weight_version,
            last_checkpoint_step=self.recovery.saved_step,
            stopping=False,
            phase_seconds=seconds,
        )

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and content of the answer to a request."""
        headers = f"Connection: close\r\nAuthorization: Bearer {_TOKEN}\r\n"
        connection = _Connection(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode())
        _Handler(cast("Any", connection), ("operator", 0), cast("Any", self._server))
        answer = HTTPResponse(cast("Any", _Connection(bytes(connection.sent))))
        answer.begin()
        return answer.status, answer.read()


class _Connection:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.sent = bytearray()

    def settimeout(self, _: float) -> None: ...

    def makefile(self, *_: Any) -> BytesIO:
        return BytesIO(self._content)

    def sendall(self, data: bytes) -> None:
        self.sent += data


_CALLS = SimpleNamespace(
    calls=SimpleNamespace(gather=lambda phase, handles, deadline, until_stop=False: handles),
    deadline=lambda phase: 600.0,
)


def newest_whole(place: Path) -> int:
    """Step of the newest checkpoint below a run folder from which a driver could go on; 0 where there is none."""
    found = [0]
    for meta in (place / "checkpoints").glob("step-*/driver.json"):
        try:
            state = json.loads(meta.read_text())
            right = (meta.parent / RANK_FILE).read_text() == weights_after(state["step"])
        except (OSError, ValueError):
            continue
        if right and meta.parent.name.removesuffix(".replaced") == f"step-{state['step']}":
            found.append(state["step"])
    return max(found)
