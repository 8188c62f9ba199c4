"""Marks of a run folder."""

from __future__ import annotations

from pathlib import Path

from rljob_api.wire.run_status import RUN_FILE, RunDescription
from rljob_worker.errors import JobError, UserError, no_folder
from rljob_worker.host.files import MOST_RUN_BYTES, read_file
from rljob_worker.host.sealed_json import unsealed

EVALUATION_FILE = "evaluation.json"
"""In a run folder of `rljob eval`: what was evaluated, and the results."""


def read_run(folder: Path) -> RunDescription | None:
    """The content of `run.json`, or None when there is none.

    Raises:
        UserError: the file is not one that RLJob wrote.
        JobError: it cannot be read.
    """
    path = folder / RUN_FILE
    try:
        return RunDescription.parse(unsealed(read_file(path, MOST_RUN_BYTES).decode()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a run description of RLJob ({error}); is this a run folder?") from None


def require_run_folder(folder: Path, option: str = "") -> RunDescription:
    """The content of `run.json`; UserError, which names the option, when the folder holds no run."""
    at = f"{option}: " if option else ""
    if not folder.is_dir():
        raise UserError(f"{at}{no_folder(folder)}; a run folder is needed")
    content = read_run(folder)
    if content is None:
        inside = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
        hint = f"; it holds {len(inside)}, of which the last is {inside[-1]}" if inside else ""
        raise UserError(f"{at}{folder}: not a run folder (it has no {RUN_FILE}){hint}")
    return content
