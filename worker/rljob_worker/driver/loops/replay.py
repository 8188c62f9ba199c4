"""Replay: train again, on samples of the journal, and sample a step's own under each version of the weights."""

from __future__ import annotations

from rljob_worker.checkpoints.journal import JournalStep
from rljob_worker.driver.learn import learn
from rljob_worker.driver.replay import ReplayJob
from rljob_worker.errors import NonFiniteError, StopRequested


def train(job: ReplayJob) -> None:
    """Go through the plan; StopRequested when the job was asked to stop before its end."""
    for recorded in job.plan.trained:
        if job.stopping():
            raise StopRequested
        with job.clock.phase("rollout"):
            job.sample_again()
        job.turn_to_training()
        train_again(job, recorded)
        job.turn_to_generation()
    with job.clock.phase("rollout"):
        job.sample_again()


def train_again(job: ReplayJob, recorded: JournalStep) -> None:
    """One step's training, on what was sampled then."""
    step = job.step_of(recorded)
    learn(job.training, job.clock, step)
    if not step.applied:
        raise NonFiniteError(f"step {step.number}: {step.non_finite_reason()}; the update was not applied")
    job.compare_training(step)
    job.advance(step)
