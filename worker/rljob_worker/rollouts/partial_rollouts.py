"""Partial rollout: a step ends when enough groups are complete, and the others go on in the next one."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api import derived
from rljob_worker.errors import JobError
from rljob_worker.flow.partial import overdue, quotas, share, spread
from rljob_worker.rollouts.growing_rollouts import GrowingRollouts
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


class PartialRollouts(GrowingRollouts):
    """`rollout.partial.factor` times as many groups grow at once as a step trains on."""

    def _places(self, step: Step) -> int:
        return self._at_once - len(self._pool.groups)

    def _division(self, step: Step) -> tuple[Sequence[Sequence[int]], Sequence[Cut]]:
        groups = self._pool.groups
        wanted, lag = self._spec.rollout.prompts_per_step, derived.max_staleness(self._spec)
        late = overdue(groups, wanted, step.weight_version, lag)
        if late is not None:
            raise JobError(
                f"rollout: the group of prompt {late.ordinal} has tokens of weights {late.oldest_version} and cannot "
                f"be trained on within spec.rollout.staleness.max {lag} of weights {step.weight_version}"
            )
        needed = quotas(groups, wanted, step.weight_version, lag)
        held = spread([one.ordinal for one in self._growing(step)], len(self._engines))
        return held, [Cut(share(needed, frozenset(ordinals))) for ordinals in held]
