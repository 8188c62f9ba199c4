"""Files that are known by their size and checksum."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rljob_api.wire.values import WireError, block, text, whole
from rljob_worker.host.files import LOST, open_file, patiently

_CHUNK_BYTES = 2**23
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Expected content of a file, to be the one that was written."""

    name: str
    size: int
    """Bytes."""
    xxh3: str
    """xxh3_64 of the content, 16 hexadecimal digits."""

    @classmethod
    def parse(cls, content: object) -> CheckedFile:
        """From JSON; WireError when it is anything else."""
        file = block(content, "a file")
        name = text(file.get("name"), "name")
        if not _NAME.fullmatch(name):
            raise WireError(f"name must be that of a file in the folder, not {name!r}")
        return cls(name, whole(file.get("size"), "size"), text(file.get("xxh3"), "xxh3"))


def damage(folder: str | Path, expected: CheckedFile) -> str:
    """Damage of a file of a folder; empty when it is as it was written. Reads it whole.

    What is no regular file, or has another size, is not read.

    Raises:
        OSError: it cannot be read now, which says nothing of its content.
    """
    path = Path(folder) / expected.name
    try:
        size, xxh3 = patiently(lambda: _measured(path, expected.size))
    except OSError as error:
        if error.errno not in LOST:
            raise
        return f"{path}: {error.strerror}"
    if size != expected.size:
        return f"{path}: has {size} bytes, {expected.size} were written"
    if xxh3 != expected.xxh3:
        return f"{path}: its content is not what was written (xxh3 {xxh3}, not {expected.xxh3})"
    return ""


def _measured(path: Path, expected: int) -> tuple[int, str]:
    """Size and xxh3 of a file; without reading it, where it has not the size that is expected."""
    digest = xxhash.xxh3_64()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        left = size if size == expected else 0
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return size, digest.hexdigest()
