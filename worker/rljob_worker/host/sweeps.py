"""What dead processes left behind: whatever is to be found again carries its owner's identity in its name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rljob_worker.host.processes import ProcessIdentity


def left_behind(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Entries of `parent` named `prefix` and the identity of a process that is no more."""
    for entry in sorted(parent.glob(f"{prefix}*")):
        owner = ProcessIdentity.parse(entry.name.removeprefix(prefix))
        if owner is not None and not owner.alive():
            yield entry


def own_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """Make a folder for this process alone, named after it, and remove those of dead processes.

    Args:
        prefix: what it is for.
        parent: where; default: the temporary folder.
    """
    parent = Path(parent or tempfile.gettempdir())
    for folder in left_behind(parent, prefix):
        shutil.rmtree(folder, ignore_errors=True)
    folder = parent / f"{prefix}{ProcessIdentity.own()}"
    folder.mkdir(mode=0o700)
    return folder
