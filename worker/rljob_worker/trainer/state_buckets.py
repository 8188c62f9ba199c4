"""Buckets of an optimizer's state that come to the device one after the other, where the state is kept on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BUCKET_ELEMENTS = 2**24
"""Elements of each moment, and of masters where there are some, that are on the device at a time."""


def buckets(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of at most `BUCKET_ELEMENTS` elements together, as slices of `sizes`; a larger one is alone."""
    first = held = 0
    for place, size in enumerate(sizes):
        if place > first and held + size > BUCKET_ELEMENTS:
            yield slice(first, place)
            first, held = place, 0
        held += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def largest_bucket(elements: int, largest: int) -> int:
    """Most elements of a bucket.

    Args:
        elements: of the whole state's parameters.
        largest: of one of them.
    """
    return min(elements, max(BUCKET_ELEMENTS, largest))
