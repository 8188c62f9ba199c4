"""Buckets of an optimizer's state that come to the device one after the other, where the state is kept on the host.

They go through two buffers: while one bucket is updated, the one before goes back and the next one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from rljob_worker.devices.overlap import Overlap

BUCKET_ELEMENTS = 2**24
"""Elements of each moment, and of masters where there are some, that a bucket has at most."""
BUFFERS = 2

Bucket = Sequence[Tensor]
"""Flat tensors on the host, pinned where they are copied to a device."""
Update = Callable[[int, list[Tensor]], None]
"""Computes with a bucket, given its number and its tensors on the device, and changes these."""


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


def most_elements(elements: int, sizes: Sequence[int]) -> int:
    """Most elements that are on the device at once: of two buckets.

    Args:
        elements: of the whole state's parameters.
        sizes: elements of each of them, at least the two largest.
    """
    return min(elements, sum(max(BUCKET_ELEMENTS, size) for size in sorted(sizes)[-BUFFERS:]))


@torch.no_grad()
def update_through_buffers(
    homes: Sequence[Bucket], update: Update, device: torch.device, begin: Callable[[], Overlap]
) -> None:
    """Bring each bucket to the device, update it there and store it; returns when all are stored.

    Args:
        homes: buckets, each with as many tensors, of the same types.
        update: of one bucket.
        device: where they are updated.
        begin: the device's `overlap`, once the buffers are there.
    """
    buffers = [_buffer(homes[first::BUFFERS], device) for first in range(min(BUFFERS, len(homes)))]
    here = [
        [whole[: home.numel()] for whole, home in zip(buffers[number % BUFFERS], bucket, strict=True)]
        for number, bucket in enumerate(homes)
    ]
    overlap = begin()
    try:
        # Copies are in one queue: a buffer is loaded after the bucket before has left it.
        loaded = overlap.copy(partial(_copy, homes[0], here[0]), None) if homes else None
        for number, (home, bucket) in enumerate(zip(homes, here, strict=True)):
            ready = loaded
            if number + 1 < len(homes):
                loaded = overlap.copy(partial(_copy, homes[number + 1], here[number + 1]), None)
            updated = overlap.compute(partial(update, number, bucket), ready)
            overlap.copy(partial(_copy, bucket, home), updated)
    finally:
        # Also after an error: the buffers are in use until then.
        overlap.finish()


def _buffer(homes: Sequence[Bucket], device: torch.device) -> list[Tensor]:
    """Tensors in which each of these buckets has room."""
    return [
        torch.empty(max(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=device)
        for tensors in zip(*homes, strict=True)
    ]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
