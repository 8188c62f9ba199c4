"""The run folder: one job's records, checkpoints and logs, owned by one driver at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from rljob_api import RLJob
from rljob_api.rules import MUTABLE_FIELDS, RESUMABLE_FIELDS
from rljob_worker.driver.checkpoints import CheckpointStore
from rljob_worker.errors import JobError, UserError
from rljob_worker.records.run_files import RUN_FILE, read_run, write_whole

_LOCK = ".lock"
Resume = bool | Literal["auto"]
"""Whether to continue the run in the folder; `auto`: if there is one, as often as the same command is given."""
_LOCK_SECONDS = 60.0
"""How long a driver before this one may take to end: on another host its lock lives until the file server notices."""
_LOCK_POLL_SECONDS = 0.5
_MAY_CHANGE = (*MUTABLE_FIELDS, *RESUMABLE_FIELDS)
"""Blocks of the spec that a resumed run may change without becoming another job."""


class RunFolder:
    """A folder that belongs to one job.

    Raises UserError when the folder holds another job's run, a run that was not asked to be resumed, or is in use; with
    `auto`, JobError when it is in use for long: the attempt before this one should have ended.
    """

    def __init__(self, path: Path, job: RLJob, resume: Resume) -> None:
        self.path = path.resolve()
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / _LOCK).exists():
                self._refuse_strangers()
            self._lock = open(self.path / _LOCK, "w")  # noqa: SIM115  (held for the life of the driver)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be a run folder: {error.strerror}") from None
        try:
            self._lock_or_refuse(_LOCK_SECONDS if resume == "auto" else 0.0)
            self._take(job, resume)
        except BaseException:
            self._lock.close()
            raise

    def _lock_or_refuse(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not seconds:
                    raise UserError(f"{self.path}: another rljob driver is running in this folder") from None
                if time.monotonic() > deadline:
                    raise JobError(
                        f"{self.path}: another rljob driver is still running in this folder after {seconds:g} s"
                    ) from None
            except OSError as error:
                raise UserError(f"{self.path}: its file system cannot lock files: {error.strerror}") from None
            time.sleep(_LOCK_POLL_SECONDS)

    def _take(self, job: RLJob, resume: Resume) -> None:
        manifest = job.model_dump(mode="json", by_alias=True, exclude={"status"})
        previous = read_run(self.path)
        if previous is None:
            self._refuse_strangers()
            if resume is not True:
                _refuse_old_checkpoints(job)
            self.attempt = 1
        else:
            if not resume:
                raise UserError(
                    f"{self.path}: holds a run of {previous['job']['metadata']['name']}; "
                    "add --resume to continue it, or name another --output folder"
                )
            _refuse_other_job(self.path, previous["job"], manifest)
            manifest["metadata"]["uid"] = manifest["metadata"].get("uid") or previous["job"]["metadata"].get("uid")
            self.attempt = previous["attempt"] + 1
        content = {"job": manifest, "attempt": self.attempt, "pid": os.getpid()}
        write_whole(self.path / RUN_FILE, json.dumps(content, indent=1))

    def _refuse_strangers(self) -> None:
        """Files of another program; those that a driver killed before its first record leaves behind are none."""
        names = {entry.name for entry in self.path.iterdir()}
        strangers = sorted(names - {_LOCK, RUN_FILE, f"{RUN_FILE}.tmp"}) if RUN_FILE not in names else []
        if strangers:
            raise UserError(f"{self.path}: not an RLJob run folder (it holds {strangers[0]}); name an empty one")

    def discard_if_new(self) -> None:
        """Remove a first attempt that never started, so that the corrected job can use the same folder."""
        if self.attempt == 1:
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            if self._made:
                self.path.rmdir()

    def close(self) -> None:
        """Let another driver use the folder."""
        self._lock.close()


def _refuse_old_checkpoints(job: RLJob) -> None:
    """A new run would silently go on from whatever lies in a checkpoint folder that is given by name."""
    given = job.spec.checkpoint.path
    steps = CheckpointStore(Path(given), job.spec.checkpoint.keep).complete_steps() if given else []
    if steps:
        raise UserError(
            f"spec.checkpoint.path: {given} holds a checkpoint of step {steps[-1]}; add --resume to continue from it, "
            "or name another folder"
        )


def _refuse_other_job(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differences = []
    if old["metadata"].get("name") != new["metadata"].get("name"):
        differences.append(f"metadata.name: {old['metadata'].get('name')} there, {new['metadata'].get('name')} here")
    uids = [metadata.get("uid") for metadata in (old["metadata"], new["metadata"])]
    if all(uids) and uids[0] != uids[1]:
        differences.append(
            f"metadata.uid: {uids[0]} there, {uids[1]} here (a job of that name was deleted and made anew)"
        )
    for key in sorted(set(old["spec"]) | set(new["spec"])):
        if key not in _MAY_CHANGE and old["spec"].get(key) != new["spec"].get(key):
            differences += _differences(f"spec.{key}", old["spec"].get(key), new["spec"].get(key))
    paths = [spec["checkpoint"].get("path") for spec in (old["spec"], new["spec"])]
    if paths[0] != paths[1]:
        # A resumed run would find no checkpoint there and silently begin at step 1.
        differences += _differences("spec.checkpoint.path", *paths)
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"{path}: belongs to another job; what differs:\n  {listed}")


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted(set(old) | set(new)):
            found += _differences(f"{path}.{key}", old.get(key), new.get(key)) if old.get(key) != new.get(key) else []
        return found
    return [f"{path}: {json.dumps(old)} there, {json.dumps(new)} here"]
