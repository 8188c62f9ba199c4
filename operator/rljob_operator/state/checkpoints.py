"""Checkpoints on request: the annotation asks, the driver is told once for each of its values."""

from __future__ import annotations

from rljob_api.status import CheckpointRequest, ConditionType
from rljob_operator.state.draft import Draft
from rljob_operator.state.plan import RequestCheckpoint
from rljob_operator.state.texts import short_value
from rljob_operator.state.timing import time_text

ANNOTATION = "rljob.dev/checkpoint-requested"


def request_checkpoint(draft: Draft) -> None:
    """Hand a new request to the driver, and say what became of the one before.

    A request that the attempt did not live to fulfil is forgotten with it, so that the next attempt gets it again.
    """
    request, condition = draft.status.checkpoint_request, draft.condition(ConditionType.CHECKPOINTING)
    open_request = condition is not None and condition.status == "True"
    if open_request and request is not None:
        open_request = not _fulfilled(draft, request)
    if open_request and draft.attempt is None:
        draft.set(checkpoint_request=None)
        _say(draft, "False", "Interrupted", "The driver ended before the checkpoint was written.")
    value = draft.job.annotations.get(ANNOTATION)
    driver, attempt = draft.driver, draft.attempt
    if value is None or driver is None or attempt is None or not driver.ready or driver.stopping or attempt.stop_time:
        return
    request = draft.status.checkpoint_request
    if request is not None and request.value == short_value(value):
        return
    # Of the driver's step and its last checkpoint either may have been read first: an older one fulfils nothing.
    step = max(draft.step, _saved_step(draft))
    asked = CheckpointRequest(value=short_value(value), time=time_text(draft.now), step=step)
    draft.set(checkpoint_request=asked)
    draft.act(RequestCheckpoint(value))
    _say(draft, "True", "Requested", f"A checkpoint was asked for at step {step}.")
    draft.note("Normal", "CheckpointRequested", f"The driver saves a checkpoint after the step that follows {step}.")


def _fulfilled(draft: Draft, request: CheckpointRequest) -> bool:
    saved = _saved_step(draft)
    if saved <= request.step:
        return False
    _say(draft, "False", "Saved", f"The checkpoint of step {saved} is complete.")
    draft.note("Normal", "CheckpointSaved", f"The checkpoint of step {saved} is complete.")
    return True


def _saved_step(draft: Draft) -> int:
    progress = draft.status.progress
    return progress.last_checkpoint.step if progress is not None and progress.last_checkpoint is not None else -1


def _say(draft: Draft, status: str, reason: str, message: str) -> None:
    draft.set_condition(ConditionType.CHECKPOINTING, "True" if status == "True" else "False", reason, message)
