"""Files that readers find whole, whatever instant the process or the machine dies at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".tmp"
"""Ends the name of a file that is being written."""


@contextmanager
def replacing(path: Path, *, durable: bool = True, writer: str = "") -> Iterator[IO[bytes]]:
    """Write a file beside `path` that takes its place when the block ends well.

    Args:
        path: the file; a reader finds its old or its new content.
        durable: whether that also holds after a crash of the machine, which costs the time of the disk.
        writer: name of this writer, where there may be several at a time.
    """
    temporary = path.with_name(f"{path.name}.{writer}{TEMPORARY}" if writer else path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        yield file
        if durable:
            sync_file(file)
    temporary.replace(path)


def write_whole(path: Path, text: str, *, durable: bool = True, writer: str = "") -> None:
    """Write a text file by `replacing`; what UTF-8 cannot hold is escaped with backslashes."""
    with replacing(path, durable=durable, writer=writer) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def sync_file(file: IO[Any]) -> None:
    """Have the content of an open file on disk; its name is there once its folder is synced too."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk: files that were made, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
