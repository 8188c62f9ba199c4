"""Files that are known by their size and checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from rljob_api.wire.values import block, text, whole

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
    """What is wrong with a file of a folder; empty when it is as it was written. Reads it whole."""
    path = Path(folder) / expected.name
    digest, size = xxhash.xxh3_64(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if size != expected.size:
        return f"{path}: has {size} bytes, {expected.size} were written"
    if digest.hexdigest() != expected.xxh3:
        return f"{path}: its content is not what was written (xxh3 {digest.hexdigest()}, not {expected.xxh3})"
    return ""
