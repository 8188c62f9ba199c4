"""Groups that a step of partial rollout waits for, and those of them that it trains on. Pure.

A step trains on `wanted` groups. A group that is not complete then goes on in the next step, under other weights, but
no token that is trained on is more than `max_staleness` versions old. Nothing is thrown away for that: each group has
a last step, `oldest_version + max_staleness`, and of the groups with a last step of d or earlier no more are ever left
over than the steps up to d have room for, `wanted` each. Whatever completes first, the oldest can be trained on in
time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from rljob_worker.flow.group import Group
from rljob_worker.types import Quota


def overdue(groups: Iterable[Group], wanted: int, version: int, max_staleness: int) -> Group | None:
    """A group that cannot be trained on in time, whatever the steps from `version` on wait for; None: all can."""
    for place, group in enumerate(_oldest_first(groups)):
        # Steps from this one to the group's last one have room for so many.
        if place >= wanted * (group.oldest_version + max_staleness - version + 1):
            return group
    return None


def quotas(groups: Collection[Group], wanted: int, version: int, max_staleness: int) -> tuple[Quota, ...]:
    """Groups that must be complete before the step of weights `version` may end.

    Args:
        groups: all open ones; `overdue` of them is None.
        wanted: groups that a step trains on.
        version: of the weights of this step.
        max_staleness: how many versions old a token may be that is trained on.

    Returns:
        How many of which incomplete groups, by ordinal, must become complete; those before are counted. Empty: the
        step needs none.
    """
    found = []
    last_steps = sorted({group.oldest_version + max_staleness for group in groups})
    for last in last_steps:
        due = [group for group in groups if group.oldest_version + max_staleness <= last]
        must = len(due) - wanted * (last - version)
        if last == last_steps[-1]:
            must = max(must, wanted)
        growing = frozenset(group.ordinal for group in due if not group.complete)
        least = min(must - (len(due) - len(growing)), len(growing))
        if least > 0:
            found.append(Quota(least, growing))
    return tuple(found)


def share(wanted: Iterable[Quota], held: frozenset[int]) -> tuple[Quota, ...]:
    """The part of quotas that an engine must meet, which holds these groups; rounded up, so that all of them suffice.

    Each engine stops by what it holds itself. A common count would depend on which engine is faster, and a step that is
    repeated after a kill would end elsewhere.
    """
    parts = [(quota, quota.among & held) for quota in wanted]
    return tuple(
        Quota(math.ceil(quota.least * len(mine) / len(quota.among)), frozenset(mine)) for quota, mine in parts if mine
    )


def chosen(complete: Iterable[Group], wanted: int) -> list[Group]:
    """The groups that a step trains on: the oldest, and among those the first ones of the data; by ordinal."""
    return sorted(_oldest_first(complete)[:wanted], key=lambda group: group.ordinal)


def spread(ordinals: Iterable[int], engines: int) -> list[list[int]]:
    """Groups for each engine, in turn, by ordinal: old and new alike, wherever they were before."""
    ordered = sorted(ordinals)
    return [ordered[engine::engines] for engine in range(engines)]


def _oldest_first(groups: Iterable[Group]) -> Sequence[Group]:
    return sorted(groups, key=lambda group: (group.oldest_version, group.ordinal))
