"""Groups that a checkpoint carried over, and data that changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rljob_worker.flow import Group
from rljob_worker.types import Prompt


def still_good(carried: Sequence[Group], waiting: Mapping[int, Prompt], *, whole: bool) -> tuple[Group, ...]:
    """Groups that were carried over, without those whose prompt is left out by now; one with other tokens begins anew.

    Args:
        carried: as a checkpoint has them.
        waiting: the open prompts, by number.
        whole: they are one batch, which is sampled anew where a group of it is no good any more.
    """
    good: list[Group] = []
    for one in carried:
        prompt = waiting.get(one.ordinal)
        if prompt is not None and one.prompt_tokens != prompt.token_ids:
            begun = Group.begun(one.ordinal, prompt, len(one.episodes), one.seed, one.admitted_version)
            one = replace(begun, deferred_at=one.deferred_at)
        if prompt is not None:
            good.append(one)
    return () if whole and good != list(carried) else tuple(good)
