"""Checkpoint folders: complete or not there at all."""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError, block, whole
from rljob_worker.errors import FencedError, JobError, UserError
from rljob_worker.host.files import LOST, patiently, read_file, sync_folder, write_whole, writing
from rljob_worker.trainer.checked_file import CheckedFile

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^step-(0|[1-9]\d*)(?:\.replaced)?$")
_INCOMPLETE = re.compile(r"^step-.*?(?:\.a(\d+))?\.incomplete$")
"""Being written, by that driver; without a number, by a version of RLJob that gave none."""
_DELETED = "step-*.deleted"
_META = "driver.json"


class UnreadableError(JobError):
    """A file of a checkpoint cannot be read now, which says nothing of its content."""


@dataclass(frozen=True, slots=True)
class DriverState:
    """What the driver itself must remember; the trainers' files lie beside it."""

    step: int
    weight_version: int
    data_cursor: dict[str, Any]
    attempt: int
    world_size: int
    record: dict[str, Any] | None = None
    """The step's record as far as it was known; None when it stands in steps.jsonl already."""
    files: tuple[CheckedFile, ...] | None = None
    """What each rank wrote; None in checkpoints of versions that did not record it."""
    earlier_records: tuple[dict[str, Any], ...] = ()
    """Records of steps before this one that were not surely on disk; whoever continues writes those that are lost."""
    carried: tuple[dict[str, Any], ...] = ()
    """Groups that were left open, as `flow.Group.as_json`; only with partial rollout and tail batching."""

    @classmethod
    def parse(cls, content: Any) -> DriverState:
        """From the JSON of `driver.json`; WireError when it is anything else."""
        state = block(content, "it")
        record, files = state.get("record"), state.get("files")
        if record is not None:
            StepRecord.parse_draft(record)
        earlier = _listed(state.get("earlier_records", []), "earlier_records")
        for earlier_record in earlier:
            StepRecord.parse(earlier_record)
        return cls(
            step=whole(state.get("step"), "step"),
            weight_version=whole(state.get("weight_version"), "weight_version"),
            data_cursor=dict(block(state.get("data_cursor"), "data_cursor")),
            attempt=whole(state.get("attempt"), "attempt"),
            world_size=whole(state.get("world_size"), "world_size"),
            record=record,
            files=None if files is None else tuple(map(CheckedFile.parse, _listed(files, "files"))),
            earlier_records=tuple(earlier),
            carried=tuple(dict(block(one, "carried")) for one in _listed(state.get("carried", []), "carried")),
        )


def checkpoint_root(run_folder: Path, given: str | None) -> Path:
    """Where the checkpoints of a run are: `spec.checkpoint.path` where it is given."""
    return Path(given) if given else run_folder / "checkpoints"


class Checkpoints:
    """The complete checkpoints below one root, for whoever reads them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def complete_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first."""
        if not self.root.is_dir():
            return []
        found = (_NAME.match(entry.name) for entry in self.root.iterdir() if (entry / _META).is_file())
        return sorted({int(match.group(1)) for match in found if match})

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        final, replaced = self._final(step), self._replaced(step)
        return replaced if not final.is_dir() and replaced.is_dir() else final

    def read(self, step: int) -> DriverState:
        """State of the checkpoint of `step`.

        Raises:
            UserError: there is no complete one.
            JobError: its `driver.json` is not what a driver wrote.
            UnreadableError: it cannot be read now.
        """
        path = self.folder(step) / _META
        try:
            state = DriverState.parse(json.loads(patiently(lambda: read_file(path))))
            if state.step != step:
                raise WireError(f"step must be that of the folder, {step}, not {state.step}")
            return state
        except (FileNotFoundError, NotADirectoryError):
            have = ", ".join(map(str, self.complete_steps())) or "none"
            raise UserError(f"{self.root}: no complete checkpoint of step {step}; complete ones: {have}") from None
        except OSError as error:
            kind = JobError if error.errno in LOST else UnreadableError
            raise kind(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise JobError(f"{path}: not the state of a driver: {error}") from None

    def latest(self) -> DriverState | None:
        """State of the newest complete checkpoint."""
        steps = self.complete_steps()
        return self.read(steps[-1]) if steps else None

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def _replaced(self, step: int) -> Path:
        """Where the old checkpoint of a step is for the instant in which a new one takes its name."""
        return self.root / f"step-{step}.replaced"


class CheckpointStore(Checkpoints):
    """`step-N/` folders below one root, written under another name and renamed when every file is on disk.

    Whatever instant the process or the machine dies at, each step has its old checkpoint, its new one or none: folders
    that are being written or deleted have names that no reader looks at.

    Of several drivers the last one alone commits. `step-N.aM.incomplete` is what driver M is writing; a later one
    renames it before it looks for what is there, and M's own renaming then fails; and M looks at who owns the folders
    after it began to write, so that it does not begin under a name that nobody renames.

    Args:
        root: made at the first checkpoint, in a folder that is there.
        keep: how many stay.
        epoch: number of this driver among those that ever wrote there.
        check: FencedError when a later driver took over.
        best: which of some steps is kept beside the newest, if any.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        epoch: int,
        check: Callable[[], None],
        best: Callable[[Collection[int]], int | None] = lambda steps: None,
    ) -> None:
        super().__init__(root)
        self._best = best
        self._keep = keep
        self._epoch = epoch
        self._check = check

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into.

        Raises:
            FencedError: a later driver took over.
            JobError: the folder cannot be made.
        """
        self._check()
        folder = self.root / f"step-{step}.a{self._epoch}.incomplete"
        with self._unless_fenced(folder, "made"), writing(folder):
            if not self.root.is_dir():
                self.root.mkdir(exist_ok=True)
                sync_folder(self.root.parent)
            self._clear()
            for replaced in self.root.glob("step-*.replaced"):
                final = replaced.with_suffix("")
                self._delete(replaced) if final.is_dir() else replaced.rename(final)
            folder.mkdir()
        return folder

    def commit(self, folder: Path, state: DriverState) -> Path:
        """Make a fully written folder the checkpoint of its step and drop the oldest beyond `keep`.

        Raises:
            FencedError: a later driver took over; it has not become one then, unless that driver found it.
            JobError: it cannot be written; the checkpoints before it are as they were.
        """
        final, replaced = self._final(state.step), self._replaced(state.step)
        with self._unless_fenced(folder, "committed"):
            write_whole(folder / _META, json.dumps(asdict(state), indent=1))
            sync_folder(folder)
            self._check()
            if final.is_dir():
                final.rename(replaced)
            self._rename_own(folder, final, replaced)
            sync_folder(self.root)
            self._check()
        self._prune(replaced)
        return final

    def abandon(self, folder: Path) -> None:
        """Give the room back of one that was begun and cannot be finished."""
        with self._later():
            self._delete(folder)

    def _prune(self, replaced: Path) -> None:
        """Delete what the new checkpoint takes the place of; it is safe already, so that this can wait."""
        with self._later():
            if replaced.is_dir():
                self._delete(replaced)
            steps = self.complete_steps()
            best = self._best(steps)
            for step in steps[: -self._keep]:
                if step != best:
                    self._delete(self.folder(step))

    @contextmanager
    def _later(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("%s: cannot be deleted yet: %s", error.filename or self.root, error.strerror)

    def newest_whole(
        self, damage: Callable[[DriverState, Path], str], on_set_aside: Callable[[Path, str], None]
    ) -> DriverState | None:
        """State of the newest checkpoint that is as it was written, after setting newer ones aside by name.

        Args:
            damage: what is wrong with the ranks' files of a checkpoint in its folder; empty when nothing is.
            on_set_aside: told the new name of a damaged checkpoint, and what is wrong with it.

        Raises:
            JobError: there are checkpoints, and none of them is whole, or one cannot be read now; nothing is set aside.
            FencedError: a later driver took over.
        """
        self._check()
        self._clear()
        damaged: list[tuple[int, str]] = []
        for step in reversed(self.complete_steps()):
            state, wrong = self._examined(step, damage)
            if state is not None and not wrong:
                for other, reason in damaged:
                    aside = self._set_aside(other)
                    if aside is not None:
                        on_set_aside(aside, reason)
                return state
            damaged.append((step, wrong))
        if damaged:
            listed = "\n  ".join(reason for _, reason in damaged)
            raise JobError(
                f"{self.root}: no checkpoint is as it was written; put an undamaged copy in its place, or move the "
                f"folder away to begin at step 1:\n  {listed}"
            )
        return None

    def _examined(self, step: int, damage: Callable[[DriverState, Path], str]) -> tuple[DriverState | None, str]:
        try:
            state = self.read(step)
        except UnreadableError:
            raise
        except (JobError, UserError) as error:
            return None, str(error)
        return state, damage(state, self.folder(step))

    def _rename_own(self, folder: Path, final: Path, replaced: Path) -> None:
        """The instant of the commit; what was there before is put back where this driver's folder is gone."""
        try:
            folder.rename(final)
        except OSError:
            if replaced.is_dir() and not final.is_dir():
                replaced.rename(final)
            raise

    @contextmanager
    def _unless_fenced(self, folder: Path, what: str) -> Iterator[None]:
        """Turn an error of the file system into what it means: a later driver, or the environment."""
        try:
            yield
        except OSError as error:
            self._check()
            raise JobError(f"{error.filename or folder}: {error.strerror}: the checkpoint cannot be {what}") from error

    def _clear(self) -> None:
        """Take away what this driver and earlier ones began and did not finish: they cannot commit it from here on."""
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            match = _INCOMPLETE.match(entry.name)
            if match is not None and int(match.group(1) or 0) <= self._epoch:
                self._delete(entry)
        for entry in self.root.glob(_DELETED):
            _remove(entry)

    def _set_aside(self, step: int) -> Path | None:
        """Give a damaged checkpoint a name that no reader looks at, and that says what it is; None: it is gone."""
        self._check()
        folder = self.folder(step)
        names = (self.root / f"step-{step}.damaged{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
        target = next(name for name in names if not name.exists())
        try:
            folder.rename(target)
        except FileNotFoundError:
            return None
        try:
            self._check()
        except FencedError:
            # What was renamed may be the checkpoint that the later driver has put there meanwhile.
            if not folder.is_dir():
                target.rename(folder)
            raise
        sync_folder(self.root)
        return target

    def _delete(self, folder: Path) -> None:
        """Take it from the readers first: a half deleted folder must not look complete."""
        doomed = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.deleted")
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return
        _remove(doomed)


def _remove(folder: Path) -> None:
    """Delete a folder that no reader looks at; what a slow writer or the file system keeps stays for the next time."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: cannot be deleted yet: %s", folder, error.strerror)


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, list):
        return values
    raise WireError(f"{name} must be a list")
