"""Places of blocks that a job may have in several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.derived import data_sources, held_out_sources


def rewards_of(spec: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The rewards of a job and of its sources, each with its place below `spec`."""
    if spec.reward is not None:
        yield ("reward",), spec.reward
    for sources in (data_sources(spec), held_out_sources(spec)):
        for place, source in sources:
            if source.reward is not None:
                yield (*parts_of(place), "reward"), source.reward


def parts_of(place: str) -> tuple[str | int, ...]:
    """`data.sources[1]` as the parts of a path."""
    parts: list[str | int] = []
    for part in place.split("."):
        name, _, index = part.rstrip("]").partition("[")
        parts += [name, int(index)] if index else [name]
    return tuple(parts)
