"""The training loop: trainer and engine take turns on the same devices."""

from __future__ import annotations

from rljob_worker.driver.job import Job, Rollout
from rljob_worker.errors import NonFiniteError, StopRequested


def train(job: Job) -> None:
    """Run steps until the job is done; StopRequested when it was asked to stop before."""
    if job.due_initial_evaluation():
        job.evaluate()
    job.complete_restored_step()
    job.clock.restart()
    while job.step < job.spec.steps:
        if job.stopping():
            raise StopRequested
        train_step(job)


def train_step(job: Job) -> None:
    """One step: generate, score, train, hand the weights over. Each block is a phase of the step record."""
    clock = job.clock
    rollout: Rollout = job.next_rollout()

    with clock.phase("rollout"):
        job.generate(rollout)
    with clock.phase("reward"):
        job.collect_rewards(rollout)
    with clock.phase("rollout_sleep"):
        job.engines("sleep")

    with clock.phase("wake_up"):
        job.trainers("wake_up")
    batch = job.train_batch(rollout)
    if job.uses_reference:
        with clock.phase("ref_log_probs"):
            job.trainers("ref_log_probs", batch, job.sampling, stoppable=True)
    if job.uses_old_log_probs:
        with clock.phase("log_probs"):
            job.trainers("log_probs", batch, job.sampling, stoppable=True)
    with clock.phase("actor_train"):
        applied = job.actor_train(batch)
    job.describe(rollout)
    if not applied:
        job.record(rollout)
        raise NonFiniteError(f"step {job.step + 1}: {job.non_finite_reason()}; the update was not applied")
    job.advance()

    if job.due_checkpoint():
        with clock.phase("checkpoint"):
            job.save_checkpoint()
    with clock.phase("rollout_wake_weights"):
        job.engines("wake_weights")
    with clock.phase("update_weights"):
        job.update_weights()
    with clock.phase("sleep"):
        job.trainers("sleep")
    with clock.phase("rollout_wake_kv"):
        job.engines("wake_kv")
    if job.due_probe():
        with clock.phase("update_weights"):
            job.probe_weights()
    if job.due_evaluation():
        with clock.phase("eval"):
            job.evaluate()
    job.record(rollout)
