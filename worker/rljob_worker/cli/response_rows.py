"""Rows of a file of responses, as trajectories have them. Light: a file is looked at before anything is imported."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljob_api.rewards import MAX_TOKENS
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.records.trajectories import trajectory_files


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, row) of a JSONL file, gzipped or not, whose rows are responses as in trajectories.

    Raises:
        UserError: naming the file, the line and the key.
    """
    try:
        content = read_file(file)
        if content.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read()
    except IsADirectoryError:
        kept = trajectory_files(file)
        like = f"like {kept[max(kept)]}" if kept else "trajectories/step-*.jsonl.gz of a run folder, or of your own"
        raise UserError(f"--responses: {file} is a folder; name a file, {like}") from None
    except (OSError, EOFError, zlib.error) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"--responses: {file}: cannot be read: {said}") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            yield place, _checked(place, line)


_Kind = type[str] | type[int] | type[float]
_KEYS: dict[str, tuple[_Kind, bool]] = {
    "prompt_uid": (str, True),
    "response": (str, True),
    "prompt": (str, False),
    "finish_reason": (str, False),
    "reward_error": (str, False),
    "response_tokens": (int, False),
    "sample": (int, False),
    "ordinal": (int, False),
    "reward": (float, False),
}
"""Type of each key that is read, and whether a row must have it; others may be null."""
_WANTED: dict[_Kind, str] = {str: "text", int: "a whole number", float: "a number"}


def _checked(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: a JSON object is needed, not {type(row).__name__}")
    for key, (kind, needed) in _KEYS.items():
        value = row.get(key)
        if kind is float and type(value) is int:
            continue
        if value is None and needed:
            raise UserError(
                f"{place}: has no {key!r}: a response needs prompt_uid (SOURCE/ROW, as in trajectories) and response"
            )
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{place}: {key!r} is {type(value).__name__}: {_WANTED[kind]} is needed")
    if not 0 <= (row.get("response_tokens") or 0) <= MAX_TOKENS or (row.get("sample") or 0) < 0:
        raise UserError(f"{place}: 'response_tokens' and 'sample' are 0 or more, and tokens {MAX_TOKENS} at most")
    if row.get("reward") is not None and not abs(row["reward"]) < float("inf"):
        raise UserError(f"{place}: 'reward' is not finite: a number or null is needed")
    return row
