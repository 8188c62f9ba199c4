"""`steps.jsonl`: one JSON object a step, appended; rewritten only to set a damaged line aside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError
from rljob_worker.errors import JobError
from rljob_worker.host.files import (
    AppendedFile,
    WriteFailures,
    cut_torn_line,
    read_file,
    sync_file,
    write_whole,
    writing,
)
from rljob_worker.host.sealed_json import sealed, unsealed

logger = logging.getLogger(__name__)

RECORDS = "step records"
"""Name in `WriteFailures`."""


class StepLog:
    """The step records of a run; one thread appends, any thread reads.

    Opening it drops a last line that a kill left incomplete: it was never acknowledged as a record. Other lines that
    are no records go to `steps.jsonl.damaged`, and those after them are numbered anew: readers ask by number.

    A record that cannot be written waits for the next one, and is not shown to readers before it stands in the file:
    what was counted once is there after a restart. Until then the checkpoints have it (`not_on_disk`).

    Args:
        run_folder: where `steps.jsonl` is.
        failures: where a record that had to wait is noted.
        check_owner: FencedError when a later driver took the file over; asked before anything is written.

    Raises:
        OSError: the file cannot be read or opened.
    """

    FILE = "steps.jsonl"
    DAMAGED_FILE = "steps.jsonl.damaged"

    def __init__(
        self,
        run_folder: Path,
        failures: WriteFailures | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = run_folder / self.FILE
        self._failures = failures or WriteFailures()
        self._check_owner = check_owner
        try:
            cut_torn_line(self.path)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read: {error.strerror}") from None
        self._lines = _lines(self.path)
        self._attempts: dict[int, set[int]] = {}
        for record in self._sound_records(run_folder / self.DAMAGED_FILE):
            self._note(record)
        self._file = AppendedFile(self.path)
        self._file.flush()
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._unsynced: list[StepRecord] = []
        self._doubtful: list[StepRecord] = []
        """Whose sync failed: a later one that succeeds says nothing of them."""

    def append(self, draft: StepRecord) -> StepRecord:
        """Write one record and return it as a reader of the file would get it.

        Gives it its index (position in the file) and `rerun` (the step was executed before, by an attempt that died).

        Raises:
            ValueError: the record holds a number that JSON has no name for.
            JobError: it cannot be written, and too many wait already.
            FencedError: a later driver took the file over.
        """
        self._check_owner()
        numbered = replace(draft, index=len(self._lines) + len(self._waiting), rerun=draft.step in self._attempts)
        line = sealed(numbered.to_json(), allow_nan=False, default=_plain)
        written = StepRecord.parse(unsealed(line))
        self._waiting.append(line)
        self._unsynced.append(written)
        self._note(written)
        try:
            self._file.append(line.encode() + b"\n")
        except OSError as error:
            self._failures.note(RECORDS, error)
            if self._file.full:
                raise JobError(
                    f"{error.filename}: {error.strerror}: {self.waiting} step records wait for it"
                ) from error
        self._show_written()
        return written

    @property
    def waiting(self) -> int:
        """Records that are not in the file yet."""
        return len(self._waiting)

    def not_on_disk(self) -> list[StepRecord]:
        """Write and sync what can be; returns, in their order, the records that a crash may still take.

        Raises:
            FencedError: some wait to be written, and a later driver took the file over.
        """
        if self._waiting:
            self._check_owner()
        try:
            self._file.flush()
        except OSError as error:
            self._failures.note(RECORDS, error)
            self._show_written()
            return [*self._doubtful, *self._unsynced]
        self._show_written()
        covered, self._unsynced = self._unsynced, []
        try:
            self._file.sync()
        except OSError as error:
            self._failures.note(RECORDS, error)
            self._doubtful += covered
        return list(self._doubtful)

    def _show_written(self) -> None:
        """Readers see a record as soon as all of its line stands in the file."""
        arrived = len(self._waiting) - self._file.waiting.count(b"\n")
        if arrived:
            with self._lock:
                self._lines += self._waiting[:arrived]
            del self._waiting[:arrived]

    def _sound_records(self, target: Path) -> list[StepRecord]:
        """Lines that are records; those that are none are set aside in `target`."""
        sound: list[StepRecord] = []
        damaged: list[str] = []
        for number, line in enumerate(self._lines, start=1):
            try:
                sound.append(_parsed(self.path, number, line))
            except JobError as error:
                logger.warning("%s; the line is set aside in %s, the run goes on", error, target.name)
                damaged.append(line)
        if not damaged:
            return sound
        text = "".join(f"{line}\n" for line in damaged).encode("utf-8", "surrogateescape")
        with writing(target, len(text)), open(target, "ab") as file:
            file.write(text)
            sync_file(file)
        self._lines = [sealed(replace(record, index=i).to_json()) for i, record in enumerate(sound)]
        write_whole(self.path, "".join(f"{line}\n" for line in self._lines))
        return sound

    def _note(self, record: StepRecord) -> None:
        self._attempts.setdefault(record.step, set()).add(record.attempt)

    def has(self, step: int, attempt: int) -> bool:
        """Whether the record of a step of an attempt stands in the log."""
        return attempt in self._attempts.get(step, ())

    def after(self, index: int) -> list[str]:
        """Lines of the records whose `index` is above the given one (-1: all); safe from any thread."""
        with self._lock:
            return self._lines[max(index, -1) + 1 :]

    def records(self) -> list[StepRecord]:
        """All records, also those that wait to be written."""
        lines = [*self._lines, *self._waiting]
        return [_parsed(self.path, number, line) for number, line in enumerate(lines, start=1)]

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Have on disk what can be, and close."""
        with suppress(JobError):
            self.not_on_disk()
        self._file.close()


def read_steps(run_folder: Path) -> list[StepRecord]:
    """All complete records of a run folder; JobError names the line of a broken one."""
    path = run_folder / StepLog.FILE
    return [_parsed(path, number, line) for number, line in enumerate(_lines(path), start=1)]


def _lines(path: Path) -> list[str]:
    try:
        content = read_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    # Not `splitlines`: it would also cut at what JSON takes for a character.
    return [line.decode("utf-8", "surrogateescape") for line in content.split(b"\n")[:-1]]


def _parsed(path: Path, number: int, line: str) -> StepRecord:
    try:
        record = StepRecord.parse(unsealed(line))
        for name in record.metrics:
            record.metric(name)
        record.memory_states()
        return record
    except (WireError, ValueError, RecursionError) as error:
        raise JobError(f"{path}:{number}: not a step record: {error}") from None


def effective_steps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records that the newest weights came from, by step; that of step 0 among them.

    An attempt that continues from an older checkpoint makes every record of that step or a later one obsolete, whether
    or not it got as far again.
    """
    kept: list[StepRecord] = []
    for record in reversed(records):
        if not kept or record.step < kept[-1].step:
            kept.append(record)
    return kept[::-1]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a step record")
