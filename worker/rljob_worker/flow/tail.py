"""Groups that a step of tail batching generates, and its end. Pure.

A short step begins more groups than it trains on, and ends when enough are complete. The others are deferred: their
tokens are dropped, their prompts wait, until a long step trains on as many of them as a step needs and waits for each
(RollPacker, arXiv 2509.21009, section 4). A group keeps its sampling noise, whenever it is sampled: were it drawn anew,
a prompt would be trained on where its answer came out short, and asked again where it came out long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from rljob_worker.types import Cut, Quota

Waiting = Mapping[int, int | None]
"""The open groups by ordinal: the step that deferred it, None where none did."""


def longest_wait(wanted: int, at_once: int) -> int:
    """Steps after which a deferred group gets its long step even if it has too few others beside it.

    Twice as many as it takes to defer `wanted` groups where each short step defers all that it has too many.

    Args:
        wanted: groups that a step trains on.
        at_once: groups that a short step begins; more than `wanted`.
    """
    return 2 * math.ceil(wanted / (at_once - wanted))


def is_long(waiting: Waiting, wanted: int, step: int, most_steps: int) -> bool:
    """Whether a step is for the deferred groups: there are enough of them, or one has waited `most_steps` steps."""
    since = [deferred for deferred in waiting.values() if deferred is not None]
    return len(since) >= wanted or any(step - deferred >= most_steps for deferred in since)


def members(waiting: Waiting, wanted: int, long: bool) -> list[int]:
    """The open groups that a step generates, by ordinal.

    A long step takes those that were deferred first, and fills its places with others where it has too few; a short
    one takes all that were not deferred.
    """
    if not long:
        return sorted(ordinal for ordinal, since in waiting.items() if since is None)
    return sorted(sorted(waiting, key=lambda ordinal: _turn(ordinal, waiting[ordinal]))[:wanted])


def cuts(growing: Sequence[Collection[int]], missing: int) -> list[Cut]:
    """Cut of each engine, so that together they complete exactly `missing` groups, or all.

    Each stops by what it holds itself: a common count would depend on which engine is faster. Groups that become
    complete in the same step of an engine may be more than it was asked for.

    Args:
        growing: the groups that each engine holds.
        missing: how many of them must become complete.
    """
    total = sum(map(len, growing))
    wanted, before, made = min(missing, total), 0, []
    for held in growing:
        after = before + len(held)
        least = wanted * after // total - wanted * before // total if total else 0
        made.append(Cut((Quota(least, frozenset(held)),) if least else ()))
        before = after
    return made


def _turn(ordinal: int, since: int | None) -> tuple[bool, int, int]:
    return since is None, since or 0, ordinal
