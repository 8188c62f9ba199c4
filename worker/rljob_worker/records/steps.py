"""`steps.jsonl`: one JSON object a step, appended, never rewritten."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any


class StepLog:
    """The step records of a run.

    Opening it drops a last line that a kill left incomplete: it was never acknowledged as a record.
    """

    FILE = "steps.jsonl"

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / self.FILE
        self._cut_torn_line()
        self._records = read_steps(run_folder)
        self._done = {record["step"] for record in self._records}
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the run)
        self._changed = threading.Condition()

    def _cut_torn_line(self) -> None:
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(self.path, whole)

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write one record in a single call; marks a step that was executed before as `rerun`. Returns it."""
        record = {**record, "index": len(self._records), "rerun": record["step"] in self._done}
        line = json.dumps(record, allow_nan=False, default=_plain) + "\n"
        self._file.write(line.encode())
        with self._changed:
            self._records.append(json.loads(line))
            self._done.add(record["step"])
            self._changed.notify_all()
        return record

    def after(self, index: int) -> list[dict[str, Any]]:
        """Records whose `index` is above the given one (-1: all); safe from any thread."""
        with self._changed:
            return self._records[index + 1 :]

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_steps(run_folder: Path) -> list[dict[str, Any]]:
    """All complete records of a run folder; ValueError names the line of a broken one."""
    path = run_folder / StepLog.FILE
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON object: {error}") from None
    return records


def effective_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that the final weights came from: of each step the last execution."""
    return [last for _, last in sorted({record["step"]: record for record in records}.items())]


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: what is not finite becomes null, so that a reader cannot take it for a number."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a step record")
