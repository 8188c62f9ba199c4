"""Files that are known by their size and checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from rljob_api.wire.values import block, text, whole
from rljob_worker.host.files import LOST, patiently

_CHUNK_BYTES = 2**23


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """What a file must be, to be the one that was written."""

    name: str
    size: int
    """Bytes."""
    xxh3: str
    """xxh3_64 of the content, 16 hexadecimal digits."""

    @classmethod
    def parse(cls, content: object) -> CheckedFile:
        """From JSON; WireError when it is anything else."""
        file = block(content, "a file")
        return cls(text(file.get("name"), "name"), whole(file.get("size"), "size"), text(file.get("xxh3"), "xxh3"))


def damage(folder: str | Path, expected: CheckedFile) -> str:
    """What is wrong with a file of a folder; empty when it is as it was written. Reads it whole.

    Raises:
        OSError: it cannot be read now, which says nothing of its content.
    """
    path = Path(folder) / expected.name
    try:
        size, xxh3 = patiently(lambda: _measured(path))
    except OSError as error:
        if error.errno not in LOST:
            raise
        return f"{path}: {error.strerror}"
    if size != expected.size:
        return f"{path}: has {size} bytes, {expected.size} were written"
    if xxh3 != expected.xxh3:
        return f"{path}: its content is not what was written (xxh3 {xxh3}, not {expected.xxh3})"
    return ""


def _measured(path: Path) -> tuple[int, str]:
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
