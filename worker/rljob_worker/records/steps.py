"""`steps.jsonl`: one JSON object a step, appended; rewritten only to set a damaged line aside."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError
from rljob_worker.errors import JobError
from rljob_worker.host.files import cut_torn_line, sync_file, write_fully, write_whole

logger = logging.getLogger(__name__)


class StepLog:
    """The step records of a run; one thread appends, any thread reads.

    Opening it drops a last line that a kill left incomplete: it was never acknowledged as a record. Other lines that
    are no records go to `steps.jsonl.damaged`, and those after them are numbered anew: readers ask by number.
    """

    FILE = "steps.jsonl"
    DAMAGED_FILE = "steps.jsonl.damaged"

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / self.FILE
        cut_torn_line(self.path)
        self._lines = _lines(self.path)
        self._attempts: dict[int, set[int]] = {}
        for record in self._sound_records(run_folder / self.DAMAGED_FILE):
            self._note(record)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the run)
        self._lock = threading.Lock()

    def append(self, draft: StepRecord) -> StepRecord:
        """Write one record and return it as a reader of the file would get it.

        Gives it its index (position in the file) and `rerun` (the step was executed before, by an attempt that died).

        Raises:
            ValueError: the record holds a number that JSON has no name for.
        """
        numbered = replace(draft, index=len(self._lines), rerun=draft.step in self._attempts)
        line = json.dumps(numbered.to_json(), allow_nan=False, default=_plain)
        write_fully(self._file.fileno(), line.encode() + b"\n")
        written = StepRecord.parse(json.loads(line))
        with self._lock:
            self._lines.append(line)
        self._note(written)
        return written

    def _sound_records(self, target: Path) -> list[StepRecord]:
        """Those that are records; lines that are none are set aside in `target`."""
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
        with open(target, "ab") as file:
            file.write("".join(f"{line}\n" for line in damaged).encode("utf-8", "surrogateescape"))
            sync_file(file)
        self._lines = [json.dumps(replace(record, index=i).to_json()) for i, record in enumerate(sound)]
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
        """All records."""
        return [_parsed(self.path, number, line) for number, line in enumerate(self._lines, start=1)]

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_steps(run_folder: Path) -> list[StepRecord]:
    """All complete records of a run folder; JobError names the line of a broken one."""
    path = run_folder / StepLog.FILE
    return [_parsed(path, number, line) for number, line in enumerate(_lines(path), start=1)]


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # Not `splitlines`: it would also cut at what JSON takes for a character.
    return [line.decode("utf-8", "surrogateescape") for line in path.read_bytes().split(b"\n")[:-1]]


def _parsed(path: Path, number: int, line: str) -> StepRecord:
    try:
        record = StepRecord.parse(json.loads(line))
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
