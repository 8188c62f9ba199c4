"""`events.jsonl`, as its readers find it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_worker.host.files import read_file
from rljob_worker.host.sealed_json import unsealed

EVENTS_FILE = "events.jsonl"


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """All complete events of a run so far; lines that are none, which a lost disk may leave, are passed over."""
    path = run_folder / EVENTS_FILE
    content = b""
    with suppress(FileNotFoundError):
        content = read_file(path)
    return [event for line in content.split(b"\n")[:-1] if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        content = unsealed(line.decode())
        if isinstance(content, dict) and isinstance(content.get("event"), str):
            return content
    return None
