"""The plan while it is being made: what was observed, and the status as it will be."""

from __future__ import annotations

from typing import Literal

from rljob_api.spec import RLJobSpec
from rljob_api.status import AttemptStatus, ClusterStatus, Condition, ConditionType, JobPhase, RLJobStatus
from rljob_operator.state.observed import (
    ClusterView,
    DriverView,
    Observed,
    PodRole,
    PodView,
    SubmissionState,
    SubmissionView,
)
from rljob_operator.state.plan import Action, Event
from rljob_operator.state.status_text import clean
from rljob_operator.state.timing import seconds_of, time_text

FINAL = (JobPhase.SUCCEEDED, JobPhase.FAILED)


class PlanBuilder:
    """State that the parts of `reconcile` read and change. Nothing outside of it is changed."""

    def __init__(self, observed: Observed, now: float) -> None:
        self.observed = observed
        self.now = now
        self.job = observed.job
        self.old: RLJobStatus = _in_order(observed.job.status)
        self.status: RLJobStatus = self.old
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.status_first = False
        self.end = ("", "")
        """Reason and sentence of the job's end, once it is decided."""

    # --- what was observed ------------------------------------------------------------------

    @property
    def spec(self) -> RLJobSpec:
        """The spec; only asked for after it was found valid."""
        assert self.job.spec is not None, "an invalid spec is dealt with first"
        return self.job.spec

    @property
    def finished(self) -> bool:
        """Whether the job has reached its end."""
        return self.status.phase in FINAL

    @property
    def own_cluster(self) -> ClusterView | None:
        """The job's RayCluster, even one that is on its way out; never somebody else's."""
        cluster = self.observed.cluster
        return cluster if cluster is not None and cluster.owned else None

    @property
    def cluster(self) -> ClusterView | None:
        """The job's RayCluster as far as it can be used: not one that was given back."""
        cluster = self.own_cluster
        if cluster is None or cluster.deleting or cluster.uid == self.cluster_status.released_uid:
            return None
        return cluster

    @property
    def name_taken(self) -> bool:
        """Whether a RayCluster of the job's name belongs to someone else."""
        return self.observed.cluster is not None and not self.observed.cluster.owned

    @property
    def heads(self) -> list[PodView]:
        """Head pods that are there, those that end included."""
        return [pod for pod in self.observed.pods if pod.role is PodRole.HEAD]

    @property
    def head(self) -> PodView | None:
        """The head pod of the job's RayCluster, unless it ends or there is none."""
        own = self.own_cluster
        mine = [pod for pod in self.heads if own is not None and pod.cluster_uid == own.uid]
        alive = [pod for pod in mine if not pod.deleting and pod.phase not in ("Failed", "Succeeded")]
        return alive[0] if len(alive) == 1 else None

    @property
    def submission(self) -> SubmissionView | None:
        """Ray's information on the last attempt; None when it did not answer or was asked about another one."""
        view, attempt = self.observed.submission, self.last_attempt
        return view if view is not None and attempt is not None and view.id == attempt.submission_id else None

    @property
    def driver(self) -> DriverView | None:
        """The running attempt's driver; None when it does not answer."""
        attempt, submission = self.attempt, self.submission
        if attempt is None or not attempt.accepted:
            return None
        gone = submission is not None and submission.state is SubmissionState.MISSING
        return None if gone else self.observed.driver

    # --- the status as it will be -----------------------------------------------------------

    @property
    def last_attempt(self) -> AttemptStatus | None:
        """The newest attempt."""
        return self.status.attempts[-1] if self.status.attempts else None

    @property
    def attempt(self) -> AttemptStatus | None:
        """The attempt that has not ended."""
        last = self.last_attempt
        return last if last is not None and last.end_time is None else None

    @property
    def cluster_status(self) -> ClusterStatus:
        """`status.cluster`, empty when there is none yet."""
        return self.status.cluster or ClusterStatus()

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.status.progress.step if self.status.progress else 0

    def set(self, **fields: object) -> None:
        """Change fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def set_attempt(self, **fields: object) -> None:
        """Change fields of the newest attempt."""
        *earlier, last = self.status.attempts
        self.set(attempts=[*earlier, last.model_copy(update=fields)])

    def condition(self, kind: ConditionType) -> Condition | None:
        """A condition, or None when it was never set."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    def set_condition(
        self, kind: ConditionType, status: Literal["True", "False", "Unknown"], reason: str, message: str
    ) -> None:
        """Set a condition; its transition time moves only when its status differs from the stored one."""
        present = self.condition(kind)
        said = (status, reason, clean(message), self.job.generation)
        if present and (present.status, present.reason, present.message, present.observed_generation) == said:
            return
        old = next((c for c in self.old.conditions if c.type == kind), None)
        new = Condition.model_validate(
            {
                "type": str(kind),
                "status": status,
                "reason": reason,
                "message": clean(message),
                "lastTransitionTime": old.last_transition_time if old and old.status == status else time_text(self.now),
                "observedGeneration": self.job.generation,
            }
        )
        kept = [new if c.type == kind else c for c in self.status.conditions]
        self.set(conditions=kept if present is not None else [*kept, new])

    def status_since(self, kind: ConditionType, status: str) -> float | None:
        """Since when a condition has had this status; None when it has another one."""
        found = self.condition(kind)
        return seconds_of(found.last_transition_time) if found is not None and found.status == status else None

    # --- the plan ---------------------------------------------------------------------------

    def act(self, *actions: Action, status_first: bool = False) -> None:
        """Add actions, the status stored before them where that is needed to repeat them safely."""
        self.actions += actions
        self.status_first |= status_first

    def note(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Add an event."""
        self.events.append(Event(kind, reason, clean(message, 1000)))


def _in_order(status: RLJobStatus) -> RLJobStatus:
    """Attempts are a map to the API server, which may keep them in another order."""
    attempts = sorted(status.attempts, key=lambda attempt: attempt.number)
    return status if attempts == status.attempts else status.model_copy(update={"attempts": attempts})
