"""The `prompts` block of a step record: what became of the prompts, by their numbers in the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from rljob_api.wire.values import WireError, block, whole

Ranges = tuple[range, ...]
"""Ascending, disjoint, none empty."""


_RANGES = ("trained", "filtered", "open", "skipped")


@dataclass(frozen=True, slots=True)
class PromptsOfStep:
    """Prompts that a step closed, and those open after it."""

    next: int
    """The first that was never drawn."""
    trained: Ranges
    """Prompts that the step trained on."""
    filtered: Ranges
    """Prompts that its filter took."""
    open: Ranges
    """Drawn and not closed: the next step samples them again."""
    skipped: Ranges = ()
    """Rows that `spec.data.skip` leaves out."""

    @classmethod
    def of(
        cls,
        next_: int,
        trained: Iterable[int],
        filtered: Iterable[int],
        open_: Iterable[int],
        skipped: Iterable[int] = (),
    ) -> Self:
        """From the numbers themselves, in any order."""
        return cls(next_, _ranges(trained), _ranges(filtered), _ranges(open_), _ranges(skipped))

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        """Read the block as JSON gives it; WireError names the field."""
        get = block(content, where).get
        return cls(
            whole(get("next"), f"{where}.next"),
            # Versions that could not leave rows out did not name them.
            *(_parsed(get(name, [] if name == "skipped" else None), f"{where}.{name}") for name in _RANGES),
        )

    def to_json(self) -> Mapping[str, Any]:
        """The block: ranges as [first, after the last]."""
        named = {"trained": self.trained, "filtered": self.filtered, "open": self.open}
        named |= {"skipped": self.skipped} if self.skipped else {}
        return {"next": self.next, **{k: [[r.start, r.stop] for r in v] for k, v in named.items()}}


def _ranges(ordinals: Iterable[int]) -> Ranges:
    found: list[range] = []
    for ordinal in sorted(ordinals):
        if found and found[-1].stop == ordinal:
            found[-1] = range(found[-1].start, ordinal + 1)
        else:
            found.append(range(ordinal, ordinal + 1))
    return tuple(found)


def _parsed(content: Any, where: str) -> Ranges:
    if not isinstance(content, list):
        raise WireError(f"{where} must be a list of [first, after the last]")
    found: list[range] = []
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise WireError(f"{where} must be a list of [first, after the last]")
        found.append(range(whole(pair[0], where), whole(pair[1], where)))
        if not found[-1] or (len(found) > 1 and found[-2].stop > found[-1].start):
            raise WireError(f"{where} must ascend, without empty or overlapping parts")
    return tuple(found)
