"""Treatment of groups that are not complete when they reach the bound of their age. Pure.

Where a step does not wait for such a group (`Mask`, `Discard`), it may be too old for every later step. What is dropped
of it then is sampled again, once: from there on it is waited for, so that no prompt is dropped for its length.
"""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.spec.rollout import StalenessLimit
from rljob_worker.flow.group import Group


def is_waited_for(group: Group, limit: StalenessLimit) -> bool:
    """Whether steps wait until the group can be trained on in time."""
    return limit is StalenessLimit.WAIT or group.renewed


def expired(groups: Iterable[Group], version: int, max_staleness: int, limit: StalenessLimit) -> list[Group]:
    """Groups that cannot be trained on as they are, neither by the step of weights `version` nor by a later one.

    `Discard`: those with a token that is too old. `Mask`: those that are complete, with tokens that all are; of others
    the tokens that are young enough can be trained on.

    Args:
        groups: all open ones.
        version: of the weights that the step begins to train with.
        max_staleness: how many versions old a token may be that is trained on.
        limit: of the job.
    """
    if limit is StalenessLimit.WAIT:
        return []
    if limit is StalenessLimit.DISCARD:
        return [group for group in groups if group.staleness(version) > max_staleness]
    return [group for group in groups if group.complete and version - group.newest_version > max_staleness]


def oldest_trained(version: int, max_staleness: int, limit: StalenessLimit) -> int:
    """The weights whose tokens are the oldest that the step of weights `version` learns from; 0 without `Mask`."""
    return max(0, version - max_staleness) if limit is StalenessLimit.MASK else 0
