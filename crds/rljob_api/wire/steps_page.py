"""Answer of `/v1/steps?after=INDEX`: the first records whose `index` is above INDEX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rljob_api.json_types import JsonObject
from rljob_api.wire.values import WireError, block, whole

PAGE = 1000
"""Records in one answer at most."""
PAGE_BYTES = 1 << 21
"""Size at which an answer ends, with the record that takes it past that: a record of 64 devices has some 60 kB, and the
operator reads small answers only, each within a deadline."""
LARGEST_PAGE_BYTES = 2 * PAGE_BYTES
"""Largest page that a reader takes."""


def page_text(lines: Sequence[str], total: int) -> str:
    """The answer with these lines of `steps.jsonl`, as they stand there."""
    return f'{{"steps": [{", ".join(lines)}], "total": {total}}}'


@dataclass(frozen=True, slots=True)
class StepsPage:
    """A page as its reader gets it."""

    records: list[JsonObject]
    """Records as JSON gives them, with an `index`: the reader parses their content (`StepRecord.parse`)."""
    total: int
    """Records that there are."""

    @classmethod
    def parse(cls, content: object) -> Self:
        """Read an answer; WireError when it is none."""
        answer = block(content, "the answer")
        records, total = answer.get("steps"), whole(answer.get("total"), "total")
        if not isinstance(records, list) or len(records) > PAGE:
            raise WireError(f"steps is no list of at most {PAGE} records")
        if not all(isinstance(record, dict) and isinstance(record.get("index"), int) for record in records):
            raise WireError("a record's index is no whole number")
        return cls(records, total)
