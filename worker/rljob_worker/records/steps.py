"""`steps.jsonl`: one JSON object a step, appended, never rewritten."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.records.run_files import cut_torn_line, write_fully


class StepLog:
    """The step records of a run; one thread appends, any thread reads.

    Opening it drops a last line that a kill left incomplete: it was never acknowledged as a record.
    """

    FILE = "steps.jsonl"

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / self.FILE
        cut_torn_line(self.path)
        self._records = read_steps(run_folder)
        self._done = {record["step"] for record in self._records}
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the run)
        self._lock = threading.Lock()

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write one record and return it as a reader of the file would get it.

        Adds `index` (position in the file) and `rerun` (the step was executed before, by an attempt that died).

        Raises:
            ValueError: the record holds a number that JSON has no name for.
        """
        numbered = {**record, "index": len(self._records), "rerun": record["step"] in self._done}
        line = json.dumps(numbered, allow_nan=False, default=_plain)
        write_fully(self._file.fileno(), line.encode() + b"\n")
        written: dict[str, Any] = json.loads(line)
        with self._lock:
            self._records.append(written)
            self._done.add(written["step"])
        return written

    def after(self, index: int) -> list[dict[str, Any]]:
        """Records whose `index` is above the given one (-1: all); safe from any thread."""
        with self._lock:
            return self._records[max(index, -1) + 1 :]

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_steps(run_folder: Path) -> list[dict[str, Any]]:
    """All complete records of a run folder; UserError names the line of a broken one."""
    path = run_folder / StepLog.FILE
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a step record: {error}") from None
        if not isinstance(record, dict) or "step" not in record:
            raise UserError(f"{path}:{number}: not a step record: it has no step")
        records.append(record)
    return records


def effective_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that the newest weights came from, by step.

    An attempt that continues from an older checkpoint makes every record of that step or a later one obsolete, whether
    or not it got as far again.
    """
    kept: list[dict[str, Any]] = []
    for record in reversed(records):
        if not kept or record["step"] < kept[-1]["step"]:
            kept.append(record)
    return kept[::-1]


def finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """JSON has no NaN: what is not finite becomes null, so that a reader cannot take it for a number."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a step record")
