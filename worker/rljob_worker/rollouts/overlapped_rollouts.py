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
from rljob_worker.flow import Group
from rljob_worker.flow.admission import next_batch, ranges, room
from rljob_worker.flow.limits import expired, is_waited_for, oldest_trained
from rljob_worker.flow.partial import overdue
from rljob_worker.rollouts.carrying_rollouts import CarryingRollouts
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.prompt_ledger import PromptLedger
from rljob_worker.rollouts.step import Progress, Step
from rljob_worker.types import RewardResult

_SLICE_SECONDS = 0.05


class OverlappedRollouts(CarryingRollouts):
    """A step begins groups as far ahead as the bound allows, and trains on some that are complete.

    Two threads share it: that of the engines' lane lets groups grow (`generate`, `wait_for_rewards`), that of the
    trainers takes rewards and groups (`take_batch`, `take_rewards`). A group is the former's until it is complete, and
    the latter's from there on. What is in the engines when the weights change is harvested, carried over with the
    version of each token, and goes on under the new weights.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        engines: EngineGroup,
        calls: PhaseCalls,
        prompts: PromptLedger,
        inputs: Inputs,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        super().__init__(spec, engines, calls, prompts, inputs, progress, stop)
        self._lag = derived.max_staleness(spec)
        self._staleness = spec.rollout.staleness or StalenessSpec()
        self._limit = derived.on_limit(spec)
        self._wanted = spec.rollout.prompts_per_step
        self._drawn, self._paused = threading.Event(), threading.Event()
        self._scoring: set[int] = set()
        """Groups that went to their rewards, and were not given all of them."""
        self._results: dict[int, dict[int, RewardResult]] = {}
        """By group and sample, of those that wait for others of their group, or for their step to begin."""

    def next_step(self) -> Step:
        """Begin the next step, with what is open; what no step can train on any more is sampled again."""
        self._drawn.clear()
        self._paused.clear()
        step = super().next_step()
        version = step.weight_version
        step.oldest_trained = oldest_trained(version, self._lag, self._limit)
        groups = list(step.open.values())
        for ordinal in (group.ordinal for group in expired(groups, version, self._lag, self._limit)):
            step.discarded.append(step.open[ordinal])
            step.open[ordinal] = step.open[ordinal].sampled_again(version)
            self._scoring.discard(ordinal)
            self._results.pop(ordinal, None)
        return step

    # --- the engines' lane --------------------------------------------------------------------

    def generate(self, step: Step) -> None:
        """Begin as many groups as may be, and let all that are open grow until they are complete or `pause` was called;
        each then goes to its reward.

        Raises:
            JobError: what was carried over cannot be trained on in time: the checkpoint is of a job with another bound.
        """
        self._draw(step)
        for one in list(step.open.values()):
            if one.complete and not one.results and one.ordinal not in self._scoring:
                # It was carried over by a run that ended before its rewards came.
                self._submit(one)
        self._drawn.set()
        waited_for = [one for one in list(step.open.values()) if is_waited_for(one, self._limit)]
        late = overdue(waited_for, self._wanted, step.weight_version, self._lag)
        if late is not None:
            raise JobError(
                f"rollout: the group of prompt {late.ordinal} has tokens of weights {late.oldest_version} and cannot "
                f"be trained on within spec.rollout.staleness.max {self._lag} of weights {step.weight_version}"
            )
        # The trainers' lane takes groups away meanwhile: what is gone through is a copy.
        while growing := sorted(ordinal for ordinal, one in list(step.open.items()) if not one.complete):
            sizes = [len(step.open[ordinal].requests()) for ordinal in growing]
            held = [[growing[place] for place in places] for places in ranges(sizes, len(self._engines))]
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
            if not self.take_rewards(step, _SLICE_SECONDS) and not to_come:
                raise JobError(f"step {step.number}: no batch can be made of {len(step.open)} groups that are complete")
        for group in batch:
            ordinal = group.ordinal
            if (lag := group.lag(step.weight_version)) > self._lag and self._limit is not StalenessLimit.MASK:
                raise JobError(
                    f"rollout: the group of prompt {ordinal} has tokens of weights {group.oldest_version}, {lag} "
                    f"updates before the {step.weight_version} of step {step.number}; spec.rollout.staleness.max is "
                    f"{self._lag}"
                )
            self._take(step, step.open[ordinal])
        step.rounds, step.passed = 1, len(batch)
        self._set_advantages(step)

    def take_rewards(self, step: Step, patience: float) -> bool:
        """Give groups the rewards that have come; whether there were some, for which it waits so many seconds."""
        came = self._receive(patience)
        for ordinal, results in list(self._results.items()):
            one = step.open[ordinal]
            if len(results) == len(one.episodes):
                step.open[ordinal] = replace(one, results=tuple(results[sample] for sample in sorted(results)))
                del self._results[ordinal]
                self._scoring.discard(ordinal)
        return came

    def pause(self, step: Step) -> None:
        """Have the engines end what they generate for the step; `generate` returns with what there is."""
        self._paused.set()
        self._engines.beside(Engine.harvest, step.weight_version)

    def forget_errors(self, step: Step) -> None:
        """Have groups scored again, by whoever continues, whose rewards a stop signal may have ended."""
        for ordinal, one in list(step.open.items()):
            if any(result.error for result in one.results):
                step.open[ordinal] = replace(one, results=())

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
        return room(len(step.open), self._wanted, left, self._lag, self._staleness.in_flight)

    def _seed(self, step: Step, ordinal: int) -> int:
        # Those of a run whose steps draw their own prompts, so that staleness 0 has its bits.
        of_step, place = divmod(ordinal, self._wanted)
        return request_seed(self._spec.seed, of_step + 1, place, 0)

    def _batch(self, step: Step) -> list[Group] | None:
        open_groups = list(step.open.values())
        ready = {one.ordinal for one in open_groups if one.results}
        order, limit = self._staleness.order, self._limit
        return next_batch(open_groups, ready, self._wanted, step.weight_version, self._lag, order, limit)

    def _submit(self, one: Group) -> None:
        self._scoring.add(one.ordinal)
        super()._submit(one)

    def _receive(self, patience: float) -> bool:
        open_groups = self._running.open if self._running is not None else {}
        scored = self._inputs.rewards.take(patience, self._calls.deadline("reward_wait"))
        for sample, result in scored:
            assert sample.ordinal is not None
            one = open_groups.get(sample.ordinal)
            # A reward may come after its response was dropped.
            if one is not None and one.renewed == sample.renewed:
                self._results.setdefault(sample.ordinal, {})[sample.index] = result
        return bool(scored)
