"""Named parts of a reward as metrics: what a name must be like to have one, and how many a job has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

PREFIX = "rollout/reward_parts/"
"""Prefix of a part's name in a step record's `metrics`: its mean over the step's samples that have it."""
LEFT_OUT_KEY = "rollout/reward_parts_left_out"
"""Entry of `metrics`: how many names of the step have no metric."""
MOST_PARTS = 32
"""Names of a job that have a metric: each is a series for as long as the job is there."""
NAME_RULE = "a letter or digit first, then letters, digits, spaces and _ . / -, at most 64 in all"

# A label of Prometheus, a tag of TensorBoard and a legend of matplotlib, none of which it can break out of.
_NAME = re.compile(r"[^\W_][\w./ -]{0,63}")


class PartNames:
    """Names that have a metric: the first `MOST_PARTS` of a job that are like `NAME_RULE`.

    The order in which names come decides, so that each reader of a job's records from their first one has the same.
    """

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def admit(self, names: Iterable[str]) -> list[str]:
        """Take names in as far as there is room; returns those that have no metric."""
        left_out = []
        for name in names:
            if name in self._names:
                continue
            if len(self._names) < MOST_PARTS and _NAME.fullmatch(name):
                self._names[name] = None
            else:
                left_out.append(name)
        return left_out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)
