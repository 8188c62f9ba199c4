"""Places of blocks that a job may have in several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.derived import data_sources, held_out_sources

Placed = tuple[tuple[str | int, ...], Any]
"""A block, after its place below `spec`."""


def rewards_of(spec: Any) -> Iterator[Placed]:
    """The rewards of a job and of its sources, each with its place below `spec`."""
    if spec.reward is not None:
        yield ("reward",), spec.reward
    for at, source in _sources(spec):
        if source.reward is not None:
            yield (*at, "reward"), source.reward


def reward_functions(spec: Any) -> Iterator[tuple[Placed, Placed]]:
    """Each function that scores, with its place, and each source that it scores, with its own."""
    for at, source in _sources(spec):
        reward = source.reward or spec.reward
        where = (*at, "reward") if source.reward else ("reward",)
        if reward is not None:
            parts = [((*where, "parts", i), part) for i, part in enumerate(reward.parts or [])]
            for function in parts or [(where, reward)]:
                yield function, (at, source)


def _sources(spec: Any) -> Iterator[Placed]:
    for sources in (data_sources(spec), held_out_sources(spec)):
        for place, source in sources:
            yield parts_of(place), source


def parts_of(place: str) -> tuple[str | int, ...]:
    """`data.sources[1]` as the parts of a path."""
    parts: list[str | int] = []
    for part in place.split("."):
        name, _, index = part.rstrip("]").partition("[")
        parts += [name, int(index)] if index else [name]
    return tuple(parts)
