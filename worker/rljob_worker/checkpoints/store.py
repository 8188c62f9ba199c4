"""Writing checkpoints, by one driver at a time: a folder is complete, or has a name that no reader looks at."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_worker.checkpoints.reader import REPLACED, Checkpoints, Damage, Found, PassedOver
from rljob_worker.checkpoints.state import DriverState, write_state
from rljob_worker.errors import FencedError, JobError
from rljob_worker.host.files import sync_folder, writing

logger = logging.getLogger(__name__)

_INCOMPLETE = re.compile(r"^step-.*?(?:\.a(\d+))?\.incomplete$")
"""Being written, by that driver; without a number, by a version of RLJob that gave none."""
_DELETED = "step-*.deleted"


class CheckpointStore(Checkpoints):
    """`step-N/` folders below one root, written under another name and renamed when every file is on disk.

    Whatever instant the process or the machine dies at, each step has its old checkpoint, its new one or none: folders
    that are being written or deleted have names that no reader looks at.

    Of several drivers the last one alone commits. `step-N.aM.incomplete` is what driver M is writing; a later one
    renames it before it looks for what is there, and M's own renaming then fails; and M checks the owner of the
    folders after it began to write, so that it does not begin under a name that nobody renames.

    Args:
        root: made at the first checkpoint, in a folder that is there.
        keep: how many stay.
        epoch: number of this driver among those that ever wrote there.
        check: FencedError when a later driver took over.
        best: which of some steps is kept beside the newest, if any.
        trust_unverified: as of `Checkpoints`.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        epoch: int,
        check: Callable[[], None],
        best: Callable[[Collection[int]], int | None] = lambda steps: None,
        *,
        trust_unverified: bool = False,
    ) -> None:
        super().__init__(root, trust_unverified=trust_unverified)
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
            for replaced in self.root.glob(f"step-*{REPLACED}"):
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
            write_state(folder, state)
            sync_folder(folder)
            self._check()
            if os.path.lexists(final):
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

    def newest_whole(self, damage: Damage, on_set_aside: Callable[[Path, PassedOver], None]) -> Found | None:
        """The newest checkpoint that is as it was written, after setting newer ones aside by name.

        Args:
            damage: of the ranks' files.
            on_set_aside: gets the new name of a checkpoint that is damaged, or cannot be verified, and why.

        Raises:
            JobError, UnverifiedError: as `find_whole`; nothing is set aside.
            FencedError: a later driver took over.
        """
        self._check()
        self._clear()
        found = self.find_whole(damage)
        for one in () if found is None else found.passed_over:
            aside = self._set_aside(one)
            if aside is not None:
                on_set_aside(aside, one)
        return found

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

    def _set_aside(self, one: PassedOver) -> Path | None:
        """Give a checkpoint a name that no reader looks at, and that says what it is; None: it is gone."""
        self._check()
        folder = one.folder
        name = f"{folder.name.removesuffix(REPLACED)}.{'damaged' if one.damaged else 'unverified'}"
        names = (self.root / f"{name}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
        target = next(name for name in names if not os.path.lexists(name))
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
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: cannot be deleted yet: %s", folder, error.strerror)
