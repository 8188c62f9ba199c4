"""State shared by all loops: progress, records, evaluation, status."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rljob_api import RLJobSpec, derived
from rljob_api import metrics as m
from rljob_api.how_many import how_many
from rljob_api.spec.rollout import StalenessLimit
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.prompts_of_step import PromptsOfStep
from rljob_api.wire.run_status import ResumeChanges
from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.journal import write_journal
from rljob_worker.checkpoints.recovery import Recovery
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.cluster import Cluster
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.cluster.profiles import Profiles
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.learn import Training
from rljob_worker.driver.probe import WeightProbe
from rljob_worker.engine.arguments import max_model_length
from rljob_worker.errors import NonFiniteError
from rljob_worker.flow import Decision, GroupPool
from rljob_worker.host.files import WriteFailures
from rljob_worker.phases import PhaseClock
from rljob_worker.records.events import EventLog
from rljob_worker.records.metric_history import EarlyStop
from rljob_worker.records.token_files import write_tokens
from rljob_worker.records.trajectories import write_trajectories
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rewards.parts import PartMeans
from rljob_worker.rollouts.batch import (
    draft_metrics,
    episode_metrics,
    limit_metrics,
    oversampling_metrics,
    partial_metrics,
    rollout_metrics,
    staleness_metrics,
    tail_metrics,
)
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.kept_tokens import choose, tokens_of, with_trainers
from rljob_worker.rollouts.policies import policy_of
from rljob_worker.rollouts.rollouts import Rollouts
from rljob_worker.rollouts.step import Progress, Step

H = TypeVar("H", bound=Handover)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Input of a job."""

    spec: RLJobSpec
    cluster: Cluster
    calls: Calls
    """Calls of the thread that trains."""
    clock: PhaseClock
    stop: threading.Event
    """Set when the job was asked to stop."""
    inputs: Inputs
    checkpoints: CheckpointStore
    records: RecordWriter
    events: EventLog
    attempt: int
    early_stop: EarlyStop
    part_means: PartMeans
    failures: WriteFailures
    changes: Sequence[ResumeChanges] = ()
    """Changes that attempts made at their resume."""


class Job(ABC, Generic[H]):
    """A running job: the shared context of its loop, which is a subclass and has the order of the phases.

    Args:
        given: what it is given.
        handover: how weights go to the engines.
        engine_calls: waits for the engines, where they have a lane of their own.
        given_up: ends generation early; default: the stop request does.
    """

    def __init__(
        self,
        given: Surroundings,
        handover: type[H],
        engine_calls: PhaseCalls | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        self.spec = spec = given.spec
        self._failures = given.failures
        self.clock = given.clock
        self.ready = False
        self._pool = pool = GroupPool(given.inputs.prompts)
        self.progress = progress = Progress()
        self._calls = given.calls
        self._stop = given.stop
        self._inputs = inputs = given.inputs
        self._records = records = given.records
        self._events = given.events
        self._attempt = given.attempt
        self._early_stop = given.early_stop
        self._part_means = given.part_means
        self._reward_parts: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._unrecorded: StepRecord | None = None
        self.cluster = cluster = given.cluster
        self._in_phase = in_phase = PhaseCalls(given.calls, given.clock, spec.timeouts)
        probe = WeightProbe(spec, inputs.model.vocab_size, max_model_length(spec, inputs.model) - 1)
        self.rollouts = Rollouts(
            spec,
            policy_of(spec),
            cluster.engines,
            engine_calls or in_phase,
            pool,
            inputs,
            progress,
            given_up or given.stop,
        )
        self.profiles = Profiles(spec, given.records.folder, cluster.trainers, cluster.engines, given.events.write)
        self.training = Training(spec, cluster.trainers, in_phase, inputs.pictures)
        self.handover = handover(spec, cluster, in_phase, probe, records, progress)
        self.recovery = Recovery(
            spec,
            cluster.trainers,
            in_phase,
            given.clock,
            given.checkpoints,
            records,
            pool,
            progress,
            given.attempt,
            given.events,
            given.changes,
        )

    @abstractmethod
    def train(self) -> None:
        """Run steps until the job is done; StopRequested when it was asked to stop before."""

    def finished(self) -> bool:
        """Whether all steps are done, or `spec.earlyStop` ends the run before."""
        return self.progress.step >= self.spec.steps or bool(self._early_stop.reason())

    def end(self) -> str:
        """Save a run that ends early; returns why it does, empty where all steps are done.

        A run that ended early needs no checkpoint at a regular step: what it did since would be lost.
        """
        reason = self._early_stop.reason() if self.progress.step < self.spec.steps else ""
        if reason:
            self.recovery.save_before_leaving()
        return reason

    def goal(self) -> str:
        """Work of the job once it is ready, for people."""
        return f"continuing after step {self.progress.step}" if self.progress.step else "training"

    def done(self) -> str:
        """Work that the job did, for people."""
        return f"{how_many(self.progress.step, 'step')} done"

    def stopped(self) -> str:
        """Save what a stop request may not lose; returns what became of it, for people."""
        saved = self.recovery.save_before_leaving() if self.ready else None
        what = f"saved {saved.name}" if saved else f"nothing new to save after step {self.progress.step}"
        return f"{what}; --resume continues"

    def stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return self._stop.is_set()

    def start(self) -> int:
        """Continue from the newest checkpoint, if there is one, and bring the engines to its weights.

        Returns:
            The step that it continues after; 0 from the beginning.
        """
        self._unrecorded = self.recovery.restore_latest()
        self._early_stop.continue_after(self.progress.step)
        self._events.step = self.progress.step
        self.handover.first()
        self.profiles.at_boundary(self.progress.step, self._calls)
        return self.progress.step

    def due_evaluation(self) -> bool:
        """Whether this step ends with an evaluation."""
        evaluation = self.spec.evaluation
        if evaluation is None:
            return False
        return self.progress.step % evaluation.every_steps == 0 or self.finished()

    def due_initial_evaluation(self) -> bool:
        """Whether to evaluate before the first step."""
        return self.spec.evaluation is not None and self.spec.evaluation.at_start and self.progress.step == 0

    def evaluate(self) -> None:
        """Score the held-out prompts for the record of the running step.

        Raises:
            StopRequested: the step is then recorded by the driver that continues from its checkpoint, with an
                evaluation.
        """
        self._records.metrics(self._evaluation())

    def evaluate_at_start(self) -> None:
        """Score the held-out prompts before anything is learned, and record that as step 0, which is no step.

        Raises:
            StopRequested: there is no such record then; a driver that begins at the first step evaluates again.
        """
        self.clock.restart()
        with self.clock.phase("eval"):
            metrics = self._evaluation()
        overlapped = {"reward": self._inputs.rewards.take_busy_seconds()}
        busy, times = self._busy_since_last_step(), self._calls.times.take()
        self._records.write_evaluation_at_start(self.clock.end_step(), metrics, busy, overlapped, times)

    def complete_restored_step(self) -> None:
        """Evaluate and record the restored step, where the attempt before ended between its checkpoint and its end."""
        if self._unrecorded is None:
            return
        metrics = self._evaluation() if self.due_evaluation() else {}
        self._records.recover(self._unrecorded, metrics)
        self._unrecorded = None

    def advance(self, step: Step) -> None:
        """The step is done: its prompts are closed, and the weights are those of the next one."""
        consumed = [group.ordinal for group in step.of(Decision.TRAINED)]
        filtered = [group.ordinal for group in step.of(Decision.FILTERED)]
        pool = self._pool
        pool.settle(consumed, filtered)
        self._records.prompts(
            PromptsOfStep.of(pool.next_ordinal, consumed, filtered, pool.open_ordinals(), pool.take_skipped())
        )
        self.progress.step += 1
        self.progress.weight_version += 1

    def write_samples(self, step: Step) -> None:
        """Write the step's trajectories, which need nothing of its training; what ends that can be looked for there."""
        step.rows = step.samples()
        write_trajectories(self._records.folder, self.spec.records, step.number, step.rows, self._failures)
        step.kept = choose(step.groups, self.spec.records, step.number)
        step.tokens = tokens_of(step.kept, self._inputs.tokenizer)
        if self.spec.records.journal:
            write_journal(self._records.folder, step, self._attempt, self._failures)
        self._records.metrics(rollout_metrics(step.groups, step.advantages))

    def describe(self, step: Step) -> None:
        """Note the step's metrics, now that it was trained on."""
        self._records.samples(step.number, [row for group in step.rows for row in group])
        joined = with_trainers(step.tokens, step.kept, step.trained)
        write_tokens(self._records.folder, step.number, joined, self._failures)
        if step.occupancy.seconds:
            self._records.metrics({m.ROLLOUT_TAIL_KEY: step.occupancy.tail_share})
        if self.spec.rollout.oversampling is not None:
            self._records.metrics(oversampling_metrics(step))
        if derived.mixes_versions(self.spec):
            self._records.metrics(partial_metrics(step))
        if derived.max_staleness(self.spec):
            self._records.metrics(staleness_metrics(step))
        if derived.on_limit(self.spec) is not StalenessLimit.WAIT:
            self._records.metrics(limit_metrics(step))
        if step.drafts is not None and step.drafts.proposed:
            self._records.metrics(draft_metrics(step.drafts))
        if self.spec.rollout.tail is not None:
            self._records.metrics(tail_metrics(step))
        if self.spec.episodes is not None:
            given_back = {"rollout/episodes/given_back_groups": float(step.given_back)}
            times = {} if step.environments is None else step.environments.metrics()
            self._records.metrics(episode_metrics(step.groups) | times | given_back)
        self._records.metrics(self._part_means.metrics([result for group in step.groups for result in group.results]))
        first = step.trained[0]
        self._records.metrics(first.metrics)
        if first.imbalance is not None:
            self._records.metrics({"perf/train_imbalance": first.imbalance})
        self._records.overlapped({"reward": self._inputs.rewards.take_busy_seconds()})

    def record(self, step: Step) -> None:
        """Close the step's clock and write its record; FencedError where that is a later driver's turn."""
        self._records.busy(self._busy_since_last_step())
        self._records.ranks(self._calls.times.take())
        written = self._records.write(step.number, self.clock.end_step(), applied=step.trained[0].applied)
        self._reward_parts = {name: mean for name, mean in written.reward_parts().items() if mean is not None}
        self._events.step = self.recovery.recorded_step = step.number
        self.profiles.at_boundary(step.number, self._calls)

    def require_applied(self, step: Step) -> None:
        """Record a step whose update was not applied, and raise NonFiniteError."""
        if not step.applied:
            self.record(step)
            raise NonFiniteError(step.non_finite_reason())

    def status(self) -> DriverStatus:
        """Answer of `/v1/status`; thread-safe."""
        phase, seconds = self.clock.running()
        return DriverStatus(
            ready=self.ready,
            step=self.progress.step,
            steps=self.spec.steps,
            phase=phase,
            attempt=self._attempt,
            weight_version=self.progress.weight_version,
            last_checkpoint_step=self.recovery.saved_step,
            stopping=self._stop.is_set(),
            phase_seconds=round(seconds, 3),
            lanes=self.clock.running_beside(),
            groups=self.rollouts.open_groups(),
            engines=self.rollouts.generator.loads(),
            engine_nodes=self.cluster.engine_nodes(),
            reward_parts=self._reward_parts,
            write_failures=self._failures.counts(),
            write_messages=self._failures.messages(),
            checkpoint_warnings=dict(self.recovery.warnings),
        )

    def _evaluation(self) -> dict[str, float]:
        metrics = self._held_out()
        self._events.write("evaluation", after_step=self.progress.step, metrics=metrics)
        return metrics

    def _held_out(self) -> dict[str, float]:
        """Score the held-out prompts; StopRequested when the job was asked to stop before it was done."""
        return self.rollouts.evaluate()

    def _busy_since_last_step(self) -> dict[str, float]:
        now = dict(self._calls.busy)
        before, self._busy = self._busy, now
        return {process: seconds - before.get(process, 0.0) for process, seconds in now.items()}
