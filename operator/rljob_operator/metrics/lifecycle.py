"""Metrics that come from a job's status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rljob_api import derived
from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus, ConditionType, Goodput, JobPhase, Progress, RLJobStatus
from rljob_api.wire.exit_codes import ExitCode
from rljob_operator.state.attempts import OTHER, failed_attempts
from rljob_operator.state.observed import JobView
from rljob_operator.state.reasons import EndReason
from rljob_operator.state.timing import seconds_of, seconds_since

REASONS = (*(reason.value for reason in FailureReason), EndReason.USER_ERROR.value, EndReason.STOPPED.value, OTHER)
"""All values of the `reason` label of restarts."""


@dataclass(slots=True)
class Lifecycle:
    """A job's life-cycle metrics; counters do not move when the same status, or an older one, is observed again."""

    created: float
    phase: JobPhase | None = None
    conditions: tuple[tuple[str, str], ...] = ()
    """(type, status)."""
    target_steps: int | None = None
    devices: int | None = None
    engine_nodes: dict[str, int] = field(default_factory=dict)
    """By state; empty where their number is fixed, or not known."""
    goodput: Goodput | None = None
    running_since: float | None = None
    step: int | None = None
    reward: float | None = None
    log_prob_abs_diff: float | None = None
    last_step_time: float | None = None
    restarts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    failed_syncs: int = 0
    _ends_seen: int = -1

    def observe(self, job: JobView) -> None:
        """Take over what the status says now."""
        status = job.status
        self.phase = status.phase
        self.conditions = tuple({c.type: c.status for c in status.conditions}.items())
        self.target_steps = None if job.spec is None else job.spec.steps
        self.devices = None if job.spec is None else derived.devices(job.spec)
        self.engine_nodes = _engine_nodes(job)
        self.goodput = status.goodput
        self.running_since = _running_since(status)
        self._progress(status.progress)
        self._count_restarts(failed_attempts(status))
        self._count_failed_syncs(status.attempts)

    def _progress(self, progress: Progress | None) -> None:
        last = None if progress is None else progress.last_step
        self.step = None if progress is None else progress.step
        self.reward = None if progress is None else progress.reward_mean
        self.log_prob_abs_diff = None if last is None else last.log_prob_abs_diff
        self.last_step_time = None if last is None or last.time is None else seconds_of(last.time)

    def _count_restarts(self, counts: Mapping[str, int]) -> None:
        known = dict.fromkeys(REASONS, 0)
        for reason, count in counts.items():
            known[reason if reason in known else OTHER] += count
        # An older status counts less, and a counter never falls.
        self.restarts = {reason: max(count, self.restarts[reason]) for reason, count in known.items()}

    def _count_failed_syncs(self, attempts: Iterable[AttemptStatus]) -> None:
        ended = [a for a in attempts if a.end_time is not None and a.number > self._ends_seen]
        self.failed_syncs += sum(a.exit_code == ExitCode.WEIGHT_SYNC for a in ended)
        self._ends_seen = max([self._ends_seen, *(a.number for a in ended)])

    def device_seconds(self, useful: float | None, lost: float, now: float) -> dict[str, float]:
        """Device-seconds by state; empty while devices or goodput are not known.

        Args:
            useful: seconds of steps that count, from the records; None without records: then the status says it.
            lost: seconds of steps that were run again, from the records.
            now: Unix seconds; the present phase counts up to then.
        """
        if self.devices is None or self.goodput is None:
            return {}
        goodput, open_seconds = self.goodput, seconds_since(self.goodput.since, now)
        useful, lost = (
            (goodput.useful_seconds, goodput.lost_seconds)
            if useful is None
            else (useful, lost + goodput.abandoned_seconds)
        )
        running = goodput.running_seconds + open_seconds * (self.phase is JobPhase.RUNNING)
        seconds = {
            "queued": goodput.queued_seconds + open_seconds * (self.phase is JobPhase.QUEUED),
            "starting": goodput.starting_seconds + open_seconds * (self.phase is JobPhase.STARTING),
            "overhead": max(0.0, running - useful - lost),
            "useful": useful,
            "lost": lost,
        }
        return {state: value * self.devices for state, value in seconds.items()}


def _engine_nodes(job: JobView) -> dict[str, int]:
    cluster = job.status.cluster
    if job.spec is None or not derived.is_elastic(job.spec) or cluster is None or cluster.engine_nodes is None:
        return {}
    return {"wanted": derived.engine_nodes(job.spec), "taking_part": cluster.engine_nodes}


def _running_since(status: RLJobStatus) -> float | None:
    running = [c for c in status.conditions if c.type == ConditionType.RUNNING and c.status == "True"]
    return seconds_of(running[0].last_transition_time) if running else None
