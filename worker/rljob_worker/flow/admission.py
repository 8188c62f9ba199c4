"""Bound on generation ahead of training, and the groups that a step trains on. Pure.

A step trains on `wanted` groups with weights of some version, and leads to the next one. No token that is trained on
may be more than `max_staleness` versions old, and nothing need be thrown away for that: groups are only begun while
those that are open have room in the steps that may still train on them. A group that is begun under version v can be
trained on by the step of version v + `max_staleness` at the latest, and the steps from v to there have room for
`wanted` groups each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate

from rljob_api.spec.rollout import StalenessLimit, StalenessOrder
from rljob_worker.flow.group import Group
from rljob_worker.flow.limits import is_waited_for
from rljob_worker.flow.partial import chosen, overdue


def room(open_groups: int, wanted: int, steps_left: int, max_staleness: int, most: int | None = None) -> int:
    """Number of groups that may be begun, before the first of the steps that are left has taken its own.

    Args:
        open_groups: begun and not yet trained on: those that grow, wait for a reward, or are ready.
        wanted: groups that a step trains on.
        steps_left: steps that the job still does.
        max_staleness: how many versions old a token may be that is trained on.
        most: groups that may be open, at least `wanted`; None: as many as the bound allows.
    """
    within_bound = min(max_staleness + 1, steps_left) * wanted
    return max(0, (within_bound if most is None else min(most, within_bound)) - open_groups)


def next_batch(
    groups: Collection[Group],
    ready: Collection[int],
    wanted: int,
    version: int,
    max_staleness: int,
    order: StalenessOrder,
    limit: StalenessLimit = StalenessLimit.WAIT,
) -> list[Group] | None:
    """The groups that the step of weights `version` trains on, by ordinal; None: some of them are waited for.

    Args:
        groups: all open ones; `overdue` of those that are waited for is None, and without what is returned too.
        ready: ordinals of those that are complete and have their rewards.
    """
    if order is StalenessOrder.IN_ORDER:
        first = sorted(groups, key=lambda group: group.ordinal)[:wanted]
        return first if len(first) == wanted and all(group.ordinal in ready for group in first) else None
    complete = [group for group in groups if group.ordinal in ready]
    # First those that have to be trained on in time: others in their places would make steps wait for ever.
    picked = chosen((group for group in complete if is_waited_for(group, limit)), wanted)
    picked += chosen((group for group in complete if not is_waited_for(group, limit)), wanted - len(picked))
    picked.sort(key=lambda group: group.ordinal)
    taken = {group.ordinal for group in picked}
    rest = [group for group in groups if group.ordinal not in taken and is_waited_for(group, limit)]
    # Whoever would be too old in the next step is waited for in this one.
    enough = len(picked) == wanted and overdue(rest, wanted, version + 1, max_staleness) is None
    return picked if enough else None


def ranges(sizes: Sequence[int], engines: int) -> list[list[int]]:
    """Places of groups for each engine, side by side in their order, so that all have about as many samples.

    Args:
        sizes: open samples of each group; at least 1. Where all are equal, engines get ranges of the
            groups that are as even as can be.
        engines: how many.
    """
    held: list[list[int]] = [[] for _ in range(engines)]
    total = sum(sizes)
    for place, end in enumerate(accumulate(sizes)):
        held[math.ceil(end * engines / total) - 1].append(place)
    return held
