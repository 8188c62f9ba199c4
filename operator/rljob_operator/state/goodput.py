"""A job's time by use.

Time is settled when the phase changes, from the times in the status alone: looking more often, or an operator that was
away, changes no sum. Seconds in steps come from the driver's own records, which add up over all attempts.
"""

from __future__ import annotations

from rljob_api.status import Goodput, JobPhase, RLJobStatus
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.timing import seconds_of, seconds_since, time_text

_SUMS = {
    JobPhase.QUEUED: "queued_seconds",
    JobPhase.STARTING: "starting_seconds",
    JobPhase.RUNNING: "running_seconds",
}
_HOLDS_DEVICES = (JobPhase.STARTING, JobPhase.RUNNING)


def settled(status: RLJobStatus, now: float) -> Goodput:
    """The sums as they would be if the present phase ended now; for display while it lasts."""
    goodput = status.goodput or Goodput()
    phase = status.phase
    if phase is None or goodput.since is None:
        return goodput.model_copy(update={"since": time_text(now)})
    spent = seconds_since(goodput.since, seconds_of(time_text(now)))
    update: dict[str, object] = {"since": time_text(now)}
    if phase in _SUMS:
        update[_SUMS[phase]] = getattr(goodput, _SUMS[phase]) + spent
    if phase in _HOLDS_DEVICES and status.running_time is not None:
        update["active_seconds"] = goodput.active_seconds + spent
    return goodput.model_copy(update=update)


def active_seconds(status: RLJobStatus, now: float) -> float:
    """Seconds in which the job held devices since it first ran."""
    return settled(status, now).active_seconds


def count_steps(plan: PlanBuilder) -> None:
    """Take the seconds in steps over from the driver's records.

    Records that were read in part (the operator has just started) add up to less than is known: then what is known
    stays. Where the driver's own count of attempts begins anew, the run folder was lost with its head, and everything
    that was useful in it has to be done again.
    """
    driver, attempt = plan.driver, plan.attempt
    if driver is None or attempt is None:
        return
    goodput = plan.status.goodput or Goodput()
    if attempt.run_attempt is None:
        if _folder_is_new(plan, driver.attempt):
            goodput = _abandon(goodput, plan.step)
        plan.set_attempt(run_attempt=max(0, driver.attempt))
    lost = goodput.abandoned_seconds + driver.lost_seconds
    if driver.useful_seconds + lost >= goodput.useful_seconds + goodput.lost_seconds:
        goodput = goodput.model_copy(
            update={
                "useful_seconds": driver.useful_seconds,
                "lost_seconds": lost,
                "lost_steps": goodput.abandoned_steps + driver.lost_steps,
            }
        )
    plan.set(goodput=goodput)


def settle(plan: PlanBuilder, phase: JobPhase) -> None:
    """Change the phase, and count the time in the one before."""
    if plan.status.phase is phase:
        return
    if plan.status.phase is JobPhase.QUEUED and phase in _HOLDS_DEVICES:
        plan.set(goodput=settled(plan.status, _placed(plan)))
        plan.set(phase=JobPhase.STARTING)
    plan.set(goodput=settled(plan.status, plan.now))
    plan.set(phase=phase)
    if phase is JobPhase.RUNNING and plan.status.running_time is None:
        plan.set(running_time=time_text(plan.now))


def _placed(plan: PlanBuilder) -> float:
    """When the last pod got its node: the operator may come to see it late, and that is no time in the queue."""
    since = plan.status.goodput.since if plan.status.goodput is not None else None
    times = [pod.scheduled for pod in plan.observed.pods if not pod.deleting]
    known = [time for time in times if time is not None]
    if since is None or not known or len(known) < len(times):
        return plan.now
    return min(plan.now, max([seconds_of(since), *known]))


def _folder_is_new(plan: PlanBuilder, run_attempt: int) -> bool:
    earlier = [a.run_attempt for a in plan.status.attempts[:-1] if a.run_attempt is not None]
    return bool(earlier) and run_attempt <= earlier[-1]


def _abandon(goodput: Goodput, steps: int) -> Goodput:
    seconds = goodput.useful_seconds + goodput.lost_seconds
    return goodput.model_copy(
        update={
            "useful_seconds": 0.0,
            "lost_seconds": seconds,
            "lost_steps": goodput.lost_steps + steps,
            "abandoned_seconds": seconds,
            "abandoned_steps": goodput.lost_steps + steps,
        }
    )
