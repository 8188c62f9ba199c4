"""Removal of the remains of dead processes: whatever is to be found again carries its owner's identity in its name."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rljob_worker.host.processes import ProcessIdentity


def is_private(folder: Path, others_may: int = 0) -> bool:
    """Whether it is a folder, and no link to one, of this user, whose mode gives others nothing but `others_may`."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and not found.st_mode & 0o077 & ~others_may


def private_folders(prefix: str) -> list[Path]:
    """Private folders of the temporary folder whose name begins so; what others made there is passed by."""
    return [folder for folder in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")) if is_private(folder)]


def private_folder(prefix: str) -> Path:
    """One of `private_folders`, made where there is none, under another name where somebody else has this one."""
    folder = Path(tempfile.gettempdir()) / prefix
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = private_folders(prefix)
        return found[0] if found else Path(tempfile.mkdtemp(prefix=f"{prefix}."))
    return folder


def left_behind(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Entries of `parent` named `prefix` and the identity of a process that is no more."""
    for entry in sorted(parent.glob(f"{prefix}*")):
        owner = ProcessIdentity.parse(entry.name.removeprefix(prefix).partition(".")[0])
        if owner is not None and not owner.alive():
            yield entry


def own_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """Make a folder for this process alone, named after it, and remove those of dead processes.

    Args:
        prefix: what it is for.
        parent: where; default: the temporary folder.
    """
    parent = Path(parent or tempfile.gettempdir())
    for folder in filter(is_private, left_behind(parent, prefix)):
        shutil.rmtree(folder, ignore_errors=True)
    folder = parent / f"{prefix}{ProcessIdentity.own()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        # Whoever can see this process can make its name.
        folder = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        folder.mkdir(mode=0o700)
    return folder
