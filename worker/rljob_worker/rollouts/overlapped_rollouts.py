"""Generation that goes on while trainers learn, through updates of the weights; no token is too old for its step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from rljob_api import RLJobSpec, derived
from rljob_api.spec.rollout import StalenessLimit, StalenessSpec
from rljob_worker.cluster.groups import EngineGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.engine.engine import Engine
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested
from rljob_worker.flow import Group, GroupPool
from rljob_worker.flow.admission import next_batch, ranges, room
from rljob_worker.flow.limits import expired, is_waited_for, oldest_trained
from rljob_worker.flow.partial import overdue
from rljob_worker.rollouts.carrying_rollouts import CarryingRollouts
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.step import Progress, Step

_SLICE_SECONDS = 0.05


class OverlappedRollouts(CarryingRollouts):
    """A step begins groups as far ahead as the bound allows, and trains on some that are complete.

    Two threads share it: that of the engines' lane lets groups grow (`generate`, `wait_for_rewards`), that of the
    trainers takes rewards and groups (`take_batch`, `leave`). A group is the former's until it is complete, and
    the latter's from there on. What is in the engines when the weights change is harvested, carried over with the
    version of each token, and goes on under the new weights.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        engines: EngineGroup,
        calls: PhaseCalls,
        pool: GroupPool,
        inputs: Inputs,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        super().__init__(spec, engines, calls, pool, inputs, progress, stop)
        self._lag = derived.max_staleness(spec)
        self._staleness = spec.rollout.staleness or StalenessSpec()
        self._limit = derived.on_limit(spec)
        self._wanted = spec.rollout.prompts_per_step
        self._drawn, self._paused = threading.Event(), threading.Event()

    def next_step(self) -> Step:
        """Begin the next step, with what is open; what no step can train on any more is sampled again."""
        self._drawn.clear()
        self._paused.clear()
        step = super().next_step()
        version = step.weight_version
        step.oldest_trained = oldest_trained(version, self._lag, self._limit)
        for group in expired(self._pool.groups, version, self._lag, self._limit):
            step.discarded.append(group)
            self._pool.put(group.sampled_again(version))
        return step

    # --- the engines' lane --------------------------------------------------------------------

    def generate(self, step: Step) -> None:
        """Begin as many groups as may be, and let all that are open grow until they are complete or `pause` was called;
        each then goes to its reward.

        Raises:
            JobError: what was carried over cannot be trained on in time: the checkpoint is of a job with another bound.
        """
        self._draw(step)
        for one in self._pool.unscored():
            # It was carried over by a run that ended before its rewards came.
            self._submit(one)
        self._drawn.set()
        waited_for = [one for one in self._pool.groups if is_waited_for(one, self._limit)]
        late = overdue(waited_for, self._wanted, step.weight_version, self._lag)
        if late is not None:
            raise JobError(
                f"rollout: the group of prompt {late.ordinal} has tokens of weights {late.oldest_version} and cannot "
                f"be trained on within spec.rollout.staleness.max {self._lag} of weights {step.weight_version}"
            )
        while growing := [one for one in self._pool.groups if not one.complete]:
            sizes = [len(one.requests()) for one in growing]
            held = [[growing[place].ordinal for place in places] for places in ranges(sizes, len(self._engines))]
            if not self._grow(step, held, each=True) or self._paused.is_set():
                break
            # What an engine that was lost had returned stays; the rest of it grows in the others.
        step.drafts += self._take_draft_counts()

    def wait_for_rewards(self) -> None:
        """Wait until none is outstanding, or `pause` was called; StopRequested when the job was asked to stop."""
        while self._inputs.rewards.outstanding and not self._paused.wait(_SLICE_SECONDS):
            if self._stop.is_set():
                raise StopRequested

    # --- the trainers' lane -------------------------------------------------------------------

    def take_batch(self, step: Step, working: Callable[[], bool]) -> None:
        """Wait for the groups that the step trains on, and make advantages of their rewards.

        Args:
            step: the running one.
            working: whether the engines' lane is at work; may raise what shall end the wait.

        Raises:
            JobError: there can be no such groups.
            RewardError: a reward failed or did not come in time.
        """
        while not self._drawn.wait(_SLICE_SECONDS):
            working()
        while (batch := self._batch(step)) is None:
            to_come = working() or bool(self._inputs.rewards.outstanding)
            if not self._receive(_SLICE_SECONDS) and not to_come:
                groups = len(self._pool.groups)
                raise JobError(f"step {step.number}: no batch can be made of {groups} groups that are complete")
        for group in batch:
            if (lag := group.lag(step.weight_version)) > self._lag and self._limit is not StalenessLimit.MASK:
                raise JobError(
                    f"rollout: the group of prompt {group.ordinal} has tokens of weights {group.oldest_version}, {lag} "
                    f"updates before the {step.weight_version} of step {step.number}; spec.rollout.staleness.max is "
                    f"{self._lag}"
                )
            self._take(step, group)
        step.rounds, step.passed = 1, len(batch)
        self._set_advantages(step)

    def pause(self, step: Step) -> None:
        """Have the engines end what they generate for the step; `generate` returns with what there is."""
        self._paused.set()
        self._engines.beside(Engine.harvest, step.weight_version)

    def leave(self, step: Step, *, stopping: bool) -> None:
        """End the step, whose engines stand still: what it leaves open is the next one's.

        Args:
            step: the running one.
            stopping: a stop signal may have ended rewards: groups with errors are scored again by whoever continues.
        """
        if not stopping:
            self._receive(0.0)
        for one in self._pool.groups if stopping else []:
            if any(result.error for result in one.results):
                self._pool.put(replace(one, results=()))
        step.left = tuple(self._pool.groups)

    def evaluate(self) -> dict[str, float]:
        """As `Rollouts.evaluate`, once the rewards of training samples are in: the same processes score both."""
        while self._inputs.rewards.outstanding:
            if self._stop.is_set():
                raise StopRequested
            self._receive(_SLICE_SECONDS)
        self._receive(0.0)
        while True:
            try:
                return super().evaluate()
            except ProcessDiedError as error:
                self._engines.on_loss(error)
                # All held-out prompts are answered again by those that are left: what was scored of them goes.
                self._scores()

    # --- inside -------------------------------------------------------------------------------

    def _room(self, step: Step) -> int:
        left = self._spec.steps - self._progress.step
        return room(len(self._pool.groups), self._wanted, left, self._lag, self._staleness.in_flight)

    def _seed(self, step: Step, ordinal: int) -> int:
        # Those of a run whose steps draw their own prompts, so that staleness 0 has its bits.
        of_step, place = divmod(ordinal, self._wanted)
        return request_seed(self._spec.seed, of_step + 1, place, 0)

    def _batch(self, step: Step) -> list[Group] | None:
        open_groups = self._pool.groups
        ready = {one.ordinal for one in open_groups if one.results}
        order, limit = self._staleness.order, self._limit
        return next_batch(open_groups, ready, self._wanted, step.weight_version, self._lag, order, limit)

    def _receive(self, patience: float) -> bool:
        """Give groups the rewards that have come; whether there were some, for which it waits so many seconds."""
        scored = self._inputs.rewards.take(patience, self._calls.deadline("reward_wait"))
        for sample, result in scored:
            assert sample.ordinal is not None
            self._pool.score(sample.ordinal, sample.index, result, renewed=sample.renewed)
        return bool(scored)
