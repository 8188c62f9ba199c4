"""The run folder: one job's records, checkpoints and logs, owned by one driver at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from rljob_api import RLJob
from rljob_worker.errors import UserError

_MAY_CHANGE = ("steps", "checkpoint", "failurePolicy", "timeouts", "records", "evaluation", "suspend", "image")
"""Blocks of the spec that a resumed run may change without becoming another job."""


class RunFolder:
    """A folder that belongs to one job.

    Raises UserError when the folder holds another job's run, a run that was not asked to be resumed, or is in use.
    """

    def __init__(self, path: Path, job: RLJob, resume: bool) -> None:
        self.path = path.resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115  (held for the life of the driver)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another rljob driver is running in this folder") from None
        manifest = job.model_dump(mode="json", by_alias=True, exclude={"status"})
        previous = self._previous()
        if previous is None:
            strangers = sorted(p.name for p in self.path.iterdir() if p.name != ".lock")
            if strangers:
                raise UserError(f"{self.path}: not an RLJob run folder (it holds {strangers[0]}); name an empty one")
            self.attempt = 1
        else:
            if not resume:
                raise UserError(
                    f"{self.path}: holds a run of {previous['job']['metadata']['name']}; "
                    "add --resume to continue it, or name another --output folder"
                )
            _refuse_other_job(self.path, previous["job"], manifest)
            self.attempt = previous["attempt"] + 1
        self._write({"job": manifest, "attempt": self.attempt, "pid": os.getpid()})

    def _previous(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self.path / "run.json").read_text()))
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.path / 'run.json'}: not readable as JSON ({error}); is this a run folder?"
            ) from None

    def _write(self, content: dict[str, Any]) -> None:
        temporary = self.path / "run.json.tmp"
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self.path / "run.json")

    def discard_if_new(self) -> None:
        """Remove a first attempt that never started, so that the corrected job can use the same folder."""
        if self.attempt == 1:
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def close(self) -> None:
        """Let another driver use the folder."""
        self._lock.close()


def _refuse_other_job(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differences = []
    if old["metadata"].get("name") != new["metadata"].get("name"):
        differences.append(f"metadata.name: {old['metadata'].get('name')} there, {new['metadata'].get('name')} here")
    for key in sorted(set(old["spec"]) | set(new["spec"])):
        if key not in _MAY_CHANGE and old["spec"].get(key) != new["spec"].get(key):
            differences += _differences(f"spec.{key}", old["spec"].get(key), new["spec"].get(key))
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"{path}: belongs to another job; what differs:\n  {listed}")


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted(set(old) | set(new)):
            found += _differences(f"{path}.{key}", old.get(key), new.get(key)) if old.get(key) != new.get(key) else []
        return found
    return [f"{path}: {old!r} there, {new!r} here"]
