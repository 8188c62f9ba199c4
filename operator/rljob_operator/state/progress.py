"""Progress of the training, from the driver's answers."""

from __future__ import annotations

import math

from rljob_api.base import INT32_MAX
from rljob_api.status import AttemptStatus, CheckpointStatus, LastStep, Progress
from rljob_operator.state.observed import DriverView, StepView
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.status_text import clean
from rljob_operator.state.timing import FRESHNESS_SECONDS, duration_text, seconds_since, time_text

_PHASES_KEPT = 64
_KINDS_KEPT = 16
_CHECKPOINT_EVENTS = {"set_aside": "CheckpointSetAside", "unverified": "CheckpointUnverified"}
_YEAR_9999 = 253_370_764_800
_LONGEST_ESTIMATE = 1e12
"""Seconds; a longer estimate is left out, since an infinity cannot be written."""


def read_progress(plan: PlanBuilder) -> None:
    """Take over what the driver says; without an answer everything stays as it was."""
    driver, attempt = plan.driver, plan.attempt
    old = plan.status.progress or Progress()
    if driver is None or attempt is None:
        if plan.status.progress is not None and old.steps != plan.spec.steps:
            plan.set(progress=with_estimate(old.model_copy(update={"steps": plan.spec.steps}), old.step))
        return
    if driver.ready and attempt.start_step is None:
        plan.set_attempt(start_step=_count(driver.step))
        for what, reason in _CHECKPOINT_EVENTS.items():
            if what in driver.checkpoint_warnings:
                plan.note("Warning", reason, driver.checkpoint_warnings[what])
                # Else it would be said again until the next throttled write.
                plan.act(status_first=True)
    _note_unwritten(plan, driver, attempt)
    # Before it is ready a driver has not loaded its checkpoint yet, and would say step 0.
    new = with_estimate(_read(driver, old, plan), _count(driver.step) if driver.ready else old.step)
    same = new.model_copy(update={"last_update_time": old.last_update_time}) == old
    if not same or seconds_since(old.last_update_time, plan.now) >= FRESHNESS_SECONDS or old.last_update_time is None:
        plan.set(progress=new)


def _note_unwritten(plan: PlanBuilder, driver: DriverView, attempt: AttemptStatus) -> None:
    """Say once in an attempt of each kind of file that its driver goes on without it."""
    messages = {clean(what, 100): message for what, message in driver.unwritten.items()}
    new = [what for what in messages if what not in attempt.unwritten][: _KINDS_KEPT - len(attempt.unwritten)]
    if not new:
        return
    plan.set_attempt(unwritten=[*attempt.unwritten, *new])
    for what in new:
        cause = messages[what] or "its log says why"
        plan.note("Warning", "WriteFailed", f"The driver cannot write {what} and goes on without: {cause}")


def _read(driver: DriverView, old: Progress, plan: PlanBuilder) -> Progress:
    checkpoint, saved = old.last_checkpoint, driver.last_checkpoint_step
    if saved is not None and (checkpoint is None or checkpoint.step != saved):
        checkpoint = CheckpointStatus(step=_count(saved), time=time_text(plan.now))
    elif saved is None and driver.ready:
        checkpoint = None  # The run folder was lost, and with it what was saved there.
    last = driver.last
    return old.model_copy(
        update={
            "steps": plan.spec.steps,
            "step_seconds": _shown(_seconds(driver.median_step_seconds)),
            "reward_mean": _shown(_finite(last.reward)) if last else old.reward_mean,
            "weight_version": _version(last) if last else old.weight_version,
            "last_step": _last_step(last) if last else old.last_step,
            "stopped_early": (clean(last.stopped_early) or None) if last else old.stopped_early,
            "last_checkpoint": checkpoint,
            "last_update_time": time_text(plan.now),
        }
    )


def with_estimate(progress: Progress, step: int) -> Progress:
    """The progress at a step, with the remaining time where it can be estimated; none when nothing is left."""
    left = max(0, progress.steps - step)
    seconds = None if progress.step_seconds is None or not left else left * progress.step_seconds
    if seconds is not None and not seconds <= _LONGEST_ESTIMATE:
        seconds = None
    text = None if seconds is None else duration_text(seconds)
    return progress.model_copy(update={"step": step, "eta_seconds": seconds, "eta": text})


def _last_step(last: StepView) -> LastStep:
    seconds = {
        clean(name, 100): known for name, value in last.phases.items() if (known := _shown(_seconds(value))) is not None
    }
    return LastStep(
        step=_count(last.step),
        seconds=_shown(_seconds(last.seconds)),
        phase_seconds=dict(list(seconds.items())[:_PHASES_KEPT]),
        switch_seconds=_shown(_seconds(last.switch_seconds)),
        log_prob_abs_diff=_shown(_seconds(last.log_prob_abs_diff)),
        time=time_text(last.time) if 0 <= last.time < _YEAR_9999 else None,
    )


def _version(last: StepView) -> int | None:
    return None if last.weight_version is None else _count(last.weight_version)


def _count(value: int) -> int:
    return max(0, min(value, INT32_MAX))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(value: float | None) -> float | None:
    """Four significant digits: `kubectl get` prints a number as it is. The whole value is in the step's record."""
    return None if value is None else float(f"{value:.4g}")


def _seconds(value: float | None) -> float | None:
    """JSON has no NaN and a duration no sign: such a value is not known."""
    value = _finite(value)
    return value if value is not None and value >= 0 else None
