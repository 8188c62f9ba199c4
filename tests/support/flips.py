"""Files with one bit flipped at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from support.samples import ALL, SEED

BITS = 1_000_000 if ALL else 400
"""Bits of each file, drawn by seed where it has more."""


def flips(path: Path, *, but_last: bool = False) -> Iterator[str]:
    """The file with one bit flipped at a time, and as it was at the end.

    Args:
        path: of the file.
        but_last: without its last byte, the end of a line: a line without one is what a kill leaves of it.
    """
    whole = path.read_bytes()
    places = range(8 * (len(whole) - but_last))
    for place in sorted(random.Random(SEED).sample(places, min(BITS, len(places)))):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        yield f"bit {place % 8} of byte {place // 8} of {path.name}, {whole[place // 8 :][:1]!r}"
    path.write_bytes(whole)
