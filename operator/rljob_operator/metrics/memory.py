"""The memory of a job's processes, bounded in the number of its series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from rljob_operator.metrics.exposition import labels

MOST_RANKS = 64
"""Trainers, and engines, of a job that have a series each; of more, `min`, `mean` and `max` over ranks are shown."""


def bounded(memory: Mapping[tuple[str, str, str], float]) -> dict[str, float]:
    """Bytes by rendered labels, of bytes by (process, rank, state).

    A process with at most 64 ranks keeps its ranks; of others, the `rank` label is `min`, `mean` or `max`.
    """
    ranks: dict[str, set[str]] = defaultdict(set)
    for process, rank, _ in memory:
        ranks[process].add(rank)
    shown: dict[str, float] = {}
    many: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (process, rank, state), value in memory.items():
        if len(ranks[process]) <= MOST_RANKS:
            shown[_rendered(process, rank, state)] = value
        else:
            many[process, state].append(value)
    for (process, state), values in many.items():
        for rank, value in (("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))):
            shown[_rendered(process, rank, state)] = value
    return shown


@lru_cache(maxsize=8192)
def _rendered(process: str, rank: str, state: str) -> str:
    """Shared by all jobs: a thousand jobs' own copies would take tens of megabytes."""
    return labels(process=process, rank=rank, state=state)
