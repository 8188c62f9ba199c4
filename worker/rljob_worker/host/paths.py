"""Paths that a user gave, judged before anything is read or made."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

_LONGEST = 3800
"""Characters of a run folder's path: the files in it have up to 250 more, and Linux takes 4,095."""


def home_expanded(path: str) -> Path:
    """The path with `~` expanded; OSError where that home is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OSError(errno.ENOENT, "there is no such user, or the user has no home folder", path) from None


def what_is_at(path: Path) -> str:
    """`nothing`, `file`, `folder` or `other` (a pipe, device or socket); OSError where that cannot be determined."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def check_writable_file(path: Path) -> None:
    """Refuse what can be no file that is written, before the work whose result it gets; OSError says why."""
    kind = what_is_at(path)
    if kind == "folder":
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file")
    if kind == "other":
        raise OSError(errno.EINVAL, "is a pipe or device; name a file")
    if what_is_at(path.absolute().parent) != "folder":
        raise NotADirectoryError(errno.ENOTDIR, f"there is no folder {path.parent}; make it first")


def check_writable_folder(path: Path) -> None:
    """Refuse what can be no folder that files are written to; nothing is left behind.

    Raises:
        OSError: as making it would have raised; one of its own for a path that leaves no room for names in it.
    """
    whole = path.absolute()
    if len(str(whole)) > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, f"a path of {len(str(whole))} characters; at most {_LONGEST} are possible")
    existing = next(parent for parent in (whole, *whole.parents) if what_is_at(parent) != "nothing")
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is no folder")
    if existing == whole:
        if not os.access(whole, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    longest = max(whole.relative_to(existing).parts, key=lambda name: len(os.fsencode(name)))
    if len(os.fsencode(longest)) > os.pathconf(existing, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    os.rmdir(tempfile.mkdtemp(prefix=".rljob-", dir=existing))
