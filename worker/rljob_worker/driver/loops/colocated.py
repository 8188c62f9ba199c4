"""Mode `Colocated`: trainers and engines take turns on the same devices."""

from __future__ import annotations

from rljob_worker.driver.colocated_job import ColocatedJob
from rljob_worker.driver.learn import learn
from rljob_worker.errors import NonFiniteError, StopRequested


def train(job: ColocatedJob) -> None:
    """Run steps until the job is done; StopRequested when it was asked to stop before."""
    if job.due_initial_evaluation():
        job.evaluate_at_start()
    job.complete_restored_step()
    job.clock.restart()
    while not job.finished():
        if job.stopping():
            raise StopRequested
        train_step(job)


def train_step(job: ColocatedJob) -> None:
    """One step: generate, score, train, hand the weights over. Each block is a phase of the step record."""
    clock = job.clock
    step = job.rollouts.next_step()

    while job.rollouts.wants_round(step):
        with clock.phase("rollout"):
            job.rollouts.generate(step)
        with clock.phase("reward"):
            job.rollouts.collect_rewards()
            job.rollouts.select(step)
    with clock.phase("rollout_sleep"):
        job.switch.sleep_engines()

    with clock.phase("wake_up"):
        job.switch.wake_trainers()
    learn(job.training, clock, step, beside=job.write_samples)
    job.describe(step)
    if not step.applied:
        job.record(step)
        raise NonFiniteError(f"step {step.number}: {step.non_finite_reason()}; the update was not applied")
    job.advance(step)

    if job.recovery.due_checkpoint():
        with clock.phase("checkpoint"):
            job.recovery.save_checkpoint()
    with clock.phase("rollout_wake_weights"):
        job.switch.wake_engine_weights()
    with clock.phase("update_weights"):
        job.switch.update_weights()
    with clock.phase("sleep"):
        job.switch.sleep_trainers()
    with clock.phase("rollout_wake_kv"):
        job.switch.wake_engine_kv()
    if job.switch.due_probe():
        with clock.phase("update_weights"):
            job.switch.probe_weights()
    if job.due_evaluation():
        with clock.phase("eval"):
            job.evaluate()
    job.record(step)
