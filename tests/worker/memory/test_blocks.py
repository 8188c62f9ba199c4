"""Block bookkeeping against a plain model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_worker.memory.blocks import ALIGNMENT, BlockAllocator


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(1, 700), st.integers(-20, -1)), max_size=60))
def test_blocks_never_overlap_and_free_space_is_merged(operations: list[int]) -> None:
    allocator = BlockAllocator(8192)
    live: list[tuple[int, int]] = []
    for operation in operations:
        if operation > 0:
            try:
                start, fresh = allocator.allocate(operation)
            except MemoryError:
                largest = max([8192 - allocator.top, *(length for _, length in allocator.free_blocks())])
                assert largest < -(-operation // ALIGNMENT) * ALIGNMENT
                continue
            assert start % ALIGNMENT == 0
            assert fresh is all(start >= begin + length for begin, length in live) or not fresh
            live.append((start, -(-operation // ALIGNMENT) * ALIGNMENT))
        elif live:
            start, _ = live.pop(operation % len(live))
            allocator.free(start)
        spans = sorted([*live, *allocator.free_blocks()])
        assert sum(length for _, length in spans) == allocator.top
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
        free = allocator.free_blocks()
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(free))
        assert allocator.used == sum(length for _, length in live)
        assert allocator.live_blocks == len(live)


def test_freeing_twice_is_an_error() -> None:
    allocator = BlockAllocator(1024)
    start, _ = allocator.allocate(1)
    allocator.free(start)
    with pytest.raises(KeyError):
        allocator.free(start)
