"""Checkpoints on request: the annotation asks, the driver gets one request for each of its values."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.status import CheckpointRequest, Condition, ConditionType, RLJobStatus
from rljob_operator.state.plan import Plan, RequestCheckpoint
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.status_text import short_value
from rljob_operator.state.timing import time_text

ANNOTATION = "rljob.dev/checkpoint-requested"
_ASKED = "CheckpointRequested"


def request_checkpoint(plan: PlanBuilder) -> None:
    """Hand a new request to the driver, and say what became of the one before.

    A request that the attempt did not live to fulfil is forgotten with it, so that the next attempt gets it again.
    """
    request, condition = plan.status.checkpoint_request, plan.condition(ConditionType.CHECKPOINTING)
    open_request = condition is not None and condition.status == "True"
    if open_request and request is not None:
        open_request = not _fulfilled(plan, request)
    if open_request and plan.attempt is None:
        plan.set(checkpoint_request=None)
        _say(plan, "False", "Interrupted", "The driver ended before the checkpoint was written.")
    value = plan.job.annotations.get(ANNOTATION)
    driver, attempt = plan.driver, plan.attempt
    if value is None or driver is None or attempt is None or not driver.ready or driver.stopping or attempt.stop_time:
        return
    request = plan.status.checkpoint_request
    if request is not None and request.value == short_value(value):
        return
    # Of the driver's step and its last checkpoint either may have been read first: an older one fulfils nothing.
    step = max(plan.step, _saved_step(plan))
    if plan.status_first:
        return  # A status that is stored first would say that the driver was asked; the next look asks it.
    asked = CheckpointRequest(value=short_value(value), time=time_text(plan.now), step=step)
    plan.set(checkpoint_request=asked)
    plan.act(RequestCheckpoint(value))
    _say(plan, "True", "Requested", f"A checkpoint was asked for at step {step}.")
    plan.note("Normal", _ASKED, f"The driver saves a checkpoint after the step that follows {step}.")


def without_request(plan: Plan, before: RLJobStatus) -> Plan:
    """The plan where the driver did not take the request: the rest of it is done. It is asked again later.

    Args:
        plan: as it was made.
        before: the status as it is stored.
    """
    status = plan.status

    def others(of: RLJobStatus, wanted: bool) -> list[Condition]:
        return [one for one in of.conditions if (one.type == ConditionType.CHECKPOINTING) == wanted]

    conditions = [*others(status, False), *others(before, True)]
    kept = status.model_copy(update={"checkpoint_request": before.checkpoint_request, "conditions": conditions})
    return replace(plan, status=kept, events=tuple(one for one in plan.events if one.reason != _ASKED))


def _fulfilled(plan: PlanBuilder, request: CheckpointRequest) -> bool:
    saved = _saved_step(plan)
    if saved <= request.step:
        return False
    _say(plan, "False", "Saved", f"The checkpoint of step {saved} is complete.")
    plan.note("Normal", "CheckpointSaved", f"The checkpoint of step {saved} is complete.")
    return True


def _saved_step(plan: PlanBuilder) -> int:
    progress = plan.status.progress
    return progress.last_checkpoint.step if progress is not None and progress.last_checkpoint is not None else -1


def _say(plan: PlanBuilder, status: str, reason: str, message: str) -> None:
    plan.set_condition(ConditionType.CHECKPOINTING, "True" if status == "True" else "False", reason, message)
