"""Sizes for people."""

from __future__ import annotations


def size(number: float) -> str:
    """Bytes as `24.0 GiB`, `64 MiB` or `12 KiB`."""
    if number >= 2**30:
        return f"{number / 2**30:.1f} GiB"
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"


def mebibytes(number: int) -> str:
    """MiB, likewise."""
    return size(number * 2**20)
