"""Reasons for which an attempt ends: the sentence of each, and what follows where no rule of the job says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rljob_api.spec import FailureAction, FailureReason
from rljob_operator.state.causes import Cause, sentence


class EndReason(StrEnum):
    """Ends of an attempt that are no failures of the machinery. Rules meet the first two by their exit codes alone."""

    USER_ERROR = "UserError"
    STOPPED = "Stopped"
    COMPLETED = "Completed"
    SUSPENDED = "Suspended"
    STEPS_DONE = "StepsDone"
    STEPS_RAISED = "StepsRaised"
    DEADLINE = "DeadlineExceeded"


@dataclass(frozen=True, slots=True)
class ReasonFacts:
    """Meaning of a reason, and its consequence without a rule."""

    sentence: str
    """Said of it, alone or before what else is known; without its full stop."""
    action: FailureAction = FailureAction.RESTART
    because: str = "the default"
    """Ground of the action, in words."""
    kind_of: FailureReason | None = None
    """Rules for that reason match this one too."""


FACTS: Mapping[str, ReasonFacts] = {
    FailureReason.NODE_LOST: ReasonFacts("The node of a pod is not ready or gone"),
    FailureReason.PREEMPTED: ReasonFacts(
        "The queue took the devices back (preemption)",
        FailureAction.IGNORE,
        "a preemption is no failure",
        FailureReason.EVICTED,
    ),
    FailureReason.EVICTED: ReasonFacts("A pod was evicted"),
    FailureReason.OUT_OF_MEMORY: ReasonFacts("A pod ran out of memory"),
    FailureReason.HEAD_LOST: ReasonFacts("The head pod that the driver ran in is gone"),
    FailureReason.POD_LOST: ReasonFacts("A worker pod ended or was deleted"),
    FailureReason.READY_TIMEOUT: ReasonFacts("Pods that had their nodes were not ready in time"),
    FailureReason.START_TIMEOUT: ReasonFacts("The driver was not ready in time (spec.timeouts.startSeconds)"),
    FailureReason.PHASE_TIMEOUT: ReasonFacts("A phase was past its deadline (spec.timeouts)"),
    FailureReason.HCCL_FAILED: ReasonFacts("HCCL, which connects the NPUs, failed or was not done in time"),
    FailureReason.DRIVER_EXITED: ReasonFacts("The driver ended and has not succeeded"),
    EndReason.USER_ERROR: ReasonFacts(
        "The driver ended with exit code 2, an error of the manifest or data",
        FailureAction.FAIL,
        "a restart cannot help",
    ),
    EndReason.STOPPED: ReasonFacts(
        "The driver was stopped, and not by the operator; use spec.suspend to stop a job",
        FailureAction.IGNORE,
        "a stop that was obeyed is no failure",
    ),
    EndReason.COMPLETED: ReasonFacts("All steps are done"),
    EndReason.SUSPENDED: ReasonFacts("spec.suspend is true"),
    EndReason.STEPS_DONE: ReasonFacts("spec.steps was lowered to steps that are done"),
    EndReason.STEPS_RAISED: ReasonFacts("spec.steps was raised after the attempt began"),
    EndReason.DEADLINE: ReasonFacts("The job has been active for longer than spec.activeDeadlineSeconds"),
}
"""One entry for each member of both enumerations."""

_PLACES = {str(reason): place for place, reason in enumerate(FailureReason)}


def severity(cause: Cause) -> int:
    """Place of a cause among several that are seen at once; the least is the one to tell."""
    return _PLACES.get(cause.reason, len(_PLACES))


def caused(reason: FailureReason | EndReason, *more: str) -> Cause:
    """Cause with the sentence of its reason, and what else is known."""
    return Cause(reason, sentence(FACTS[reason].sentence, *more))


def facts_of(reason: str) -> ReasonFacts:
    """Facts of a stored reason; one that only a newer operator has is an end like any other."""
    return FACTS.get(reason, FACTS[FailureReason.DRIVER_EXITED])


def said_of(reason: str, message: str | None) -> str:
    """Message of a stored reason; its sentence where it has none."""
    return message or (sentence(FACTS[reason].sentence) if reason in FACTS else f"{reason}.")
