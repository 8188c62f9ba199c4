"""The run folder: one job's records, checkpoints and logs, owned by one driver at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rljob_api import RLJob, RLJobSpec
from rljob_api.rules.changes import Effect, changed_fields, without_changeable
from rljob_api.wire.run_status import OWNER_FILE, RUN_FILE, ResumeChanges, RunDescription
from rljob_worker.checkpoints.fencing import EPOCHS, LOCK_FILE, claim_folder, lock_folder
from rljob_worker.checkpoints.reader import Checkpoints, checkpoint_root
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.errors import FencedError, JobError, UserError
from rljob_worker.host.files import TEMPORARY, explained, sync_folder, write_whole
from rljob_worker.host.sealed_json import sealed
from rljob_worker.records.run_files import read_run

logger = logging.getLogger(__name__)

Resume = bool | Literal["auto"]
"""Whether to continue the run in the folder; `auto`: if there is one, as often as the same command is given."""
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors of a path that no restart mends; all others are the environment's."""
_LOCK_SECONDS = 60.0
"""Seconds that a driver before this one may take to end: on another host its lock lives until the file server
notices."""
_LAYOUT = {
    "training": ("backend", "fsdp", "tensorParallel", "pipelineParallel", "contextParallel", "expertParallel"),
    "rollout": ("tensorParallel",),
    "resources": ("nodes", "devicesPerNode", "trainer", "rollout"),
}
"""Fields that a resume may change beside those of `rljob_api.rules.changes`: how model and samples are divided, and by
which backend; the checkpoint is resharded."""


class RunFolder:
    """A folder that belongs to one job, and a driver's claim on it and on `spec.checkpoint.path`.

    Raises UserError when the folder holds another job's run, a run that was not asked to be resumed, or is in use; with
    `auto`, JobError when it is in use for long: the attempt before this one should have ended.
    """

    def __init__(self, path: Path, job: RLJob, resume: Resume) -> None:
        self.path = path.resolve()
        self._made: list[Path] = []
        self._parents: list[Path] = []
        self._keep = job.spec.checkpoint.keep
        self._trust_unverified = job.spec.checkpoint.trust_unverified
        root = checkpoint_root(self.path, job.spec.checkpoint.path).resolve()
        self._root = root
        self._own_root = self.path in (root, root.parent)
        """Whether the checkpoints lie in the run folder, which then is the only one to be locked and claimed."""
        with ExitStack() as stack, _not_taken(self.path):
            self._make(self.path, "a run folder", 0o700)
            if not (self.path / LOCK_FILE).exists():
                self._refuse_strangers()
            seconds = _LOCK_SECONDS if resume == "auto" else 0.0
            stack.enter_context(lock_folder(self.path, seconds))
            manifest, previous = self._checked(job, resume)
            if not self._own_root:
                self._make(root, "spec.checkpoint.path")
                stack.enter_context(lock_folder(root, seconds))
            self._take(manifest, previous)
            self._locks = stack.pop_all()

    def checkpoints(self, best: Callable[[Collection[int]], int | None] = lambda steps: None) -> CheckpointStore:
        """Checkpoints of this driver; `best` chooses of some steps the one that is kept whatever its age."""
        return CheckpointStore(
            self._root, self._keep, self._claim.epoch, self.check, best, trust_unverified=self._trust_unverified
        )

    def check(self) -> None:
        """FencedError when a later driver took the run or its checkpoints over."""
        self._claim.check()

    def is_taken_over(self) -> bool:
        """Whether a later driver has the folder: the end of this one does not matter then.

        Raises:
            JobError: that cannot be determined.
        """
        try:
            self.check()
        except FencedError:
            return True
        return False

    def open_to_others(self) -> list[Path]:
        """Its folders that other users of the machine can enter or list: their modes are the user's matter."""
        folders = [self.path] if self._own_root else [self.path, self._root]
        return [folder for folder in folders if folder.stat().st_mode & 0o005]

    def _make(self, path: Path, what: str, mode: int = 0o777) -> None:
        try:
            if not path.exists():
                self._parents += [parent for parent in path.parents if not parent.exists()]
                path.mkdir(mode, parents=True)
                self._made.append(path)
                _sync_names([path, *(parent for parent in self._parents if parent in path.parents)])
            elif not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            self._remove_made()
            raise folder_error(error, path, what) from None

    def _remove_made(self) -> None:
        """Folders that were made for this driver alone; a parent in which somebody else made something by now stays."""
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in self._parents:
            with suppress(OSError):
                parent.rmdir()

    def _checked(self, job: RLJob, resume: Resume) -> tuple[dict[str, Any], RunDescription | None]:
        """The manifest as it is kept, and the run that the folder holds."""
        manifest = job.model_dump(mode="json", by_alias=True, exclude={"status"})
        previous = read_run(self.path)
        if previous is None:
            self._refuse_strangers()
            if resume is not True:
                _refuse_old_checkpoints(job)
            return manifest, None
        if not resume:
            raise UserError(
                f"{self.path}: holds a run of {previous.name}; "
                "add --resume to continue it, or name another --output folder"
            )
        _refuse_other_job(self.path, previous.job, manifest)
        manifest["metadata"]["uid"] = manifest["metadata"].get("uid") or previous.uid
        return manifest, previous

    def _take(self, manifest: dict[str, Any], previous: RunDescription | None) -> None:
        """From here on, drivers that had the folder before are fenced off."""
        self.is_new = previous is None
        attempt = 1 if previous is None else previous.attempt + 1
        if self._own_root:
            claim = claim_folder(self.path, attempt, (self.path / RUN_FILE,))
            attempt = claim.epoch
        else:
            claim = claim_folder(self._root, attempt, (self._root / OWNER_FILE, self.path / RUN_FILE))
            owner = {"run": str(self.path), "pid": os.getpid(), "nonce": claim.nonce, "epoch": claim.epoch}
            write_whole(self._root / OWNER_FILE, sealed(owner, indent=1), writer=claim.nonce)
        self.changes = _changes(previous, manifest, attempt)
        description = RunDescription(manifest, attempt, os.getpid(), claim.nonce, claim.epoch, self.changes)
        write_whole(self.path / RUN_FILE, sealed(description.to_json(), indent=1), writer=claim.nonce, private=True)
        for folder in {self.path, claim.folder}:
            sync_folder(folder)
        self.attempt, self._claim = attempt, claim

    def _refuse_strangers(self) -> None:
        """Files of another program; those that a driver killed before its first record leaves behind are none."""
        names = {entry.name for entry in self.path.iterdir()}
        own = {name for name in names if name.startswith(RUN_FILE) and name.endswith(TEMPORARY)}
        strangers = sorted(names - own - {LOCK_FILE, EPOCHS}) if RUN_FILE not in names else []
        if strangers:
            raise UserError(f"{self.path}: not an RLJob run folder (it holds {strangers[0]}); name an empty one")

    def discard_if_new(self) -> None:
        """Remove a first attempt that never started, so that the corrected job can use the same folder."""
        if not self.is_new:
            return
        try:
            self._claim.withdraw()
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except OSError as error:
            # Why it never started is what matters.
            logger.warning("%s: cannot be emptied: %s", error.filename or self.path, error.strerror)
        self._remove_made()

    def close(self) -> None:
        """Let another driver use the folder."""
        self._locks.close()


def folder_error(error: OSError, path: Path, what: str) -> UserError | JobError:
    """Why `path` cannot be `what`: a UserError where no restart mends it."""
    if error.errno in _NO_FOLDER:
        return UserError(f"{path}: cannot be {what}: {error.strerror}")
    return JobError(f"{path}: cannot be {what}: {explained(error, path).strerror}")


def _sync_names(made: Sequence[Path]) -> None:
    """Have folders that were made on disk: what is synced in them is lost with their names."""
    for folder in made:
        # Whoever may make a folder somewhere need not be allowed to read there.
        with suppress(PermissionError):
            sync_folder(folder.parent)


@contextmanager
def _not_taken(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = explained(error, path)
        raise JobError(f"{found.filename}: the run folder cannot be taken: {found.strerror}") from error


def _refuse_old_checkpoints(job: RLJob) -> None:
    """A new run would silently go on from whatever lies in a checkpoint folder that is given by name."""
    given = job.spec.checkpoint.path
    steps = Checkpoints(Path(given)).complete_steps() if given else []
    if steps:
        raise UserError(
            f"spec.checkpoint.path: {given} holds a checkpoint of step {steps[-1]}; add --resume to continue from it, "
            "or name another folder"
        )


def _with_defaults(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest as this version would have kept it: fields that an older one did not know have their defaults."""
    try:
        spec = RLJobSpec.model_validate_json(json.dumps(manifest["spec"]), strict=True)
    except ValidationError:
        # Of a later version, or damaged: compared as it is.
        return manifest
    return manifest | {"spec": spec.model_dump(mode="json", by_alias=True)}


def _refuse_other_job(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    old = _with_defaults(old)
    differences = []
    if old["metadata"].get("name") != new["metadata"].get("name"):
        differences.append(f"metadata.name: {old['metadata'].get('name')} there, {new['metadata'].get('name')} here")
    uids = [metadata.get("uid") for metadata in (old["metadata"], new["metadata"])]
    if all(uids) and uids[0] != uids[1]:
        differences.append(
            f"metadata.uid: {uids[0]} there, {uids[1]} here (a job of that name was deleted and made anew)"
        )
    fixed = [without_changeable(manifest["spec"]) for manifest in (old, new)]
    for key in sorted(set(fixed[0]) | set(fixed[1])):
        there, here = (_without(spec.get(key), _LAYOUT.get(key, ())) for spec in fixed)
        if there != here:
            differences += _differences(f"spec.{key}", there, here)
    paths = [spec["checkpoint"].get("path") for spec in (old["spec"], new["spec"])]
    if paths[0] != paths[1]:
        # A resumed run would find no checkpoint there and silently begin at step 1.
        differences += _differences("spec.checkpoint.path", *paths)
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"{path}: belongs to another job; what differs:\n  {listed}")


def _changes(previous: RunDescription | None, manifest: dict[str, Any], attempt: int) -> tuple[ResumeChanges, ...]:
    """Changes by the attempts so far, and by this one."""
    if previous is None:
        return ()
    specs = [_with_defaults(previous.job)["spec"], manifest["spec"]]
    found: dict[Effect, list[str]] = {effect: [] for effect in Effect}
    for change in changed_fields(*specs):
        found[change.effect].append(f"spec.{change.path}")
    for key, fields in _LAYOUT.items():
        there, here = ((spec.get(key) or {}) for spec in specs)
        found[Effect.ROUNDING] += [f"spec.{key}.{name}" for name in fields if there.get(name) != here.get(name)]
    for effect, consequence in (
        (Effect.ROUNDING, "bits may differ from here on from those of a run without the change"),
        (Effect.WAY_ON, "some samples are others from here on"),
    ):
        if found[effect]:
            logger.warning("%s changed: %s", ", ".join(found[effect]), consequence)
    new = ResumeChanges(attempt, found[Effect.ROUNDING], found[Effect.WAY_ON])
    return (*previous.changes, new) if new.rounding or new.fields else tuple(previous.changes)


def _without(value: Any, fields: Collection[str]) -> Any:
    return {name: v for name, v in value.items() if name not in fields} if isinstance(value, dict) else value


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted(set(old) | set(new)):
            found += _differences(f"{path}.{key}", old.get(key), new.get(key)) if old.get(key) != new.get(key) else []
        return found
    return [f"{path}: {json.dumps(old)} there, {json.dumps(new)} here"]
