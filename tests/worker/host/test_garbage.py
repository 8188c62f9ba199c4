"""Garbage collection while a job steps."""

from __future__ import annotations

import gc
import weakref

import pytest

from rljob_worker.host.garbage import rare_collections


class Node:
    """Something that refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_kept_out_of_collections_and_new_garbage_is_not() -> None:
    """Objects of the start are frozen; a new cycle is still found."""
    frozen = gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > frozen
        assert gc.isenabled()
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None


def fails(before: tuple[int, int, int]) -> None:
    """A job whose step fails."""
    with rare_collections():
        assert gc.get_threshold() != before
        raise ValueError("a step")


def test_everything_is_as_before_at_the_end_whatever_ends_it() -> None:
    """A process that goes on after a job collects as before it."""
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="a step"):
        fails(before)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
