"""Files of one step each in a folder of the run: `step-000012.jsonl.gz`, a JSON value a line."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures, read_file, replacing

_NAME = re.compile(r"^step-(\d{6,})\.jsonl\.gz$")


def write_step_file(folder: Path, step: int, lines: Iterable[Any], what: str, failures: WriteFailures) -> Path | None:
    """Write a step's file; None where it cannot be written, which is noted in `failures` as `what`.

    Args:
        folder: made where it is not there.
        step: the step.
        lines: JSON values.
        what: the file is, for people.
        failures: where it is noted.
    """
    path = folder / f"step-{step:06d}.jsonl.gz"
    content = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), compresslevel=1)
    with failures.tolerated(what, path):
        folder.mkdir(exist_ok=True)
        with replacing(path, durable=False, wanted=len(content)) as file:
            file.write(content)
        return path
    return None


def step_files(folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    names = [(path, _NAME.match(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    return {int(match.group(1)): path for path, match in names if match}


def step_of(path: Path) -> int:
    """The step that a file of `step_files` is of."""
    match = _NAME.match(path.name)
    assert match is not None, path
    return int(match[1])


def read_step_file(path: Path) -> list[Any]:
    """The lines of a step's file; UserError where it is damaged."""
    try:
        content = read_file(path)
        if not content:
            raise EOFError("it is empty")
        # Whose end has a checksum of all of it.
        with gzip.open(io.BytesIO(content), "rb") as file:
            return [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}") from None
