"""What makes a folder a run folder, and how its files are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError

RUN_FILE = "run.json"


def read_run(folder: Path) -> dict[str, Any] | None:
    """The content of `run.json` (`job`, `attempt`, `pid`), or None when there is none.

    Raises:
        UserError: the file is not one that RLJob wrote.
    """
    path = folder / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not {"metadata", "spec"} <= set(content["job"]) or int(content["attempt"]) < 1:
            raise ValueError("it has no job")
        return dict(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not a run description of RLJob ({error}); is this a run folder?") from None


def require_run_folder(folder: Path) -> dict[str, Any]:
    """The content of `run.json`; UserError when the folder holds no run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    content = read_run(folder)
    if content is None:
        raise UserError(f"{folder}: not a run folder (it has no {RUN_FILE})")
    return content


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, also after a crash of the machine, finds the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def cut_torn_line(path: Path) -> None:
    """Drop a last line without a line break: a kill interrupted it, and the next append would run into it."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def write_fully(descriptor: int, data: bytes) -> None:
    """Write all of `data`, normally in one system call; a full disk raises instead of leaving a part unnoticed."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
