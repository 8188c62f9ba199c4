"""Ownership of a folder: of the drivers that ever used it the last one alone may change it, lock or no lock.

Each driver takes the next number with a file that only one can make, and then says so in a file that all read. A driver
that was given up (a node that was cut off, a lock that the file server dropped) sees one of the two before it commits
anything. What it had begun by then has its number in the name, and its successor renames that before it looks for what
is there: `docs/faults.md` says why that is enough.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rljob_api.wire.values import block, text, whole
from rljob_worker.errors import FencedError, JobError, UserError
from rljob_worker.host.files import MOST_RUN_BYTES, explained, read_file, sync_file, sync_folder, writing
from rljob_worker.host.sealed_json import sealed, unsealed
from rljob_worker.waiting import waiting_for

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
EPOCHS = ".epochs"
"""Folder of the epoch files: `.epochs/3` was made by the third driver."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of a file system that cannot lock files: some NFS mounts, and most that are no file systems at heart."""
_POLL_SECONDS = 0.5


def lock_folder(folder: Path, seconds: float) -> IO[str]:
    """Lock a folder for the life of the process, or until the file that is returned is closed.

    Args:
        folder: must exist.
        seconds: how long to wait for a driver that has it. 0: not at all, since somebody started a second one by hand.

    Raises:
        UserError: another driver has it, and `seconds` is 0.
        JobError: it still has it after that time, or the file cannot be made.
    """
    try:
        # A pipe in its place would be waited for.
        descriptor = os.open(folder / LOCK_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        file = open(descriptor, "w")  # noqa: SIM115  (held for the life of the driver)
    except OSError as error:
        found = explained(error, folder / LOCK_FILE)
        raise JobError(f"{found.filename}: cannot be opened for writing: {found.strerror}") from None
    try:
        with waiting_for(f"the driver that has {folder}", seconds):
            _lock_or_refuse(file, folder, seconds)
    except BaseException:
        file.close()
        raise
    return file


def _lock_or_refuse(file: IO[str], folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not seconds:
                raise UserError(f"{folder}: another rljob driver is running in this folder") from None
            if time.monotonic() > deadline:
                raise JobError(
                    f"{folder}: another rljob driver is still running in this folder after {seconds:g} s"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise JobError(f"{folder / LOCK_FILE}: cannot be locked: {error.strerror}") from None
            logger.warning(
                "%s: its file system cannot lock files (%s): a second driver is not kept waiting, it takes over",
                folder,
                error.strerror,
            )
            return
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Owner:
    """Content of a file about the driver that owns its folder."""

    epoch: int
    nonce: str

    @classmethod
    def read(cls, path: Path) -> Owner:
        """From a file; OSError, or ValueError when it says no such thing or is not what was written."""
        said = block(unsealed(read_file(path, MOST_RUN_BYTES).decode()), "it")
        epoch = said.get("epoch", said.get("attempt"))
        return cls(whole(epoch, "epoch"), text(said.get("nonce", ""), "nonce"))


@dataclass(frozen=True, slots=True)
class Claim:
    """One driver's claim on the folder of its checkpoints: good until a later driver makes one.

    `epoch` counts the drivers of that folder from 1.
    """

    folder: Path
    epoch: int
    nonce: str
    said_in: tuple[Path, ...]
    """Files that name the owner, replaced as a whole: opening one asks the file server, unlike a listing."""

    def check(self) -> None:
        """Nothing while the folder is this driver's.

        Raises:
            FencedError: a later driver took it over.
            JobError: that cannot be determined, since something is gone or cannot be read.
        """
        path = epochs = self.folder / EPOCHS
        try:
            # A folder that was lost and made anew counts from 1 again: it is told by this driver's own file.
            self._give_way(Owner(max(_epochs(self.folder)), self.nonce))
            for path in (epochs / str(self.epoch), *self.said_in):
                self._give_way(Owner.read(path))
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}: cannot tell whether this run is still this driver's") from None
        except (ValueError, RecursionError) as error:
            raise JobError(f"{path}: {error}: cannot tell whether this run is still this driver's") from None

    def _give_way(self, owner: Owner) -> None:
        if owner.epoch > self.epoch or (owner.epoch == self.epoch and owner.nonce != self.nonce):
            raise FencedError(
                f"{self.folder}: taken over by driver {owner.epoch}; this one, {self.epoch}, was given up and "
                "changes nothing there any more"
            )

    def withdraw(self) -> None:
        """Take it back before anything was done under it."""
        (self.folder / EPOCHS / str(self.epoch)).unlink(missing_ok=True)


def claim_folder(folder: Path, at_least: int, said_in: tuple[Path, ...]) -> Claim:
    """Take the next number of a folder; the owner before is fenced off from here on.

    Args:
        folder: must exist.
        at_least: the smallest number that will do.
        said_in: files that the caller now writes the claim's `epoch` and `nonce` into, before it changes anything else.

    Raises:
        JobError: another driver takes the folder at this instant, or the file cannot be made.
    """
    epochs = folder / EPOCHS
    nonce = secrets.token_hex(8)
    try:
        with writing(epochs):
            epochs.mkdir(exist_ok=True)
            epoch = max(at_least, max(_epochs(folder), default=0) + 1)
        own = epochs / str(epoch)
        content = sealed({"epoch": epoch, "nonce": nonce}) + "\n"
        with writing(own, len(content)), open(own, "x", encoding="ascii") as file:
            file.write(content)
            sync_file(file)
        sync_folder(epochs)
    except FileExistsError as error:
        raise JobError(f"{error.filename}: another driver takes the folder over at this instant") from None
    except OSError as error:
        raise JobError(f"{error.filename or epochs}: {error.strerror}: the folder cannot be taken over") from None
    return Claim(folder, epoch, nonce, said_in)


def _epochs(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder / EPOCHS) if name.isascii() and name.isdigit()]
