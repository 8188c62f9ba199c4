"""Mode `Disaggregated`: trainers and engines side by side on devices of their own, one step apart at most."""

from __future__ import annotations

from rljob_worker.driver.learn import learn
from rljob_worker.driver.lockstep_job import LockstepJob
from rljob_worker.errors import NonFiniteError, StopRequested


def train(job: LockstepJob) -> None:
    """Run steps until the job is done; StopRequested when it was asked to stop before."""
    try:
        if job.due_initial_evaluation():
            job.evaluate_at_start()
        job.complete_restored_step()
        job.clock.restart()
        while not job.finished():
            if job.stopping():
                raise StopRequested
            train_step(job)
    finally:
        job.lane.close()


def train_step(job: LockstepJob) -> None:
    """One step: train, while the engines generate for the next one where the staleness allows it; then meet."""
    clock, engines = job.clock, job.lane.clock
    step = job.rollouts.next_step()
    if not job.rollouts.select(step):
        job.begin_batch(step)
        with clock.phase("batch_wait"):
            job.lane.finish()
            job.rollouts.select(step)
    job.begin_batch(job.rollouts.step_after(step))

    learn(job.training, clock, step, beside=job.write_samples)
    job.describe(step)
    if not step.applied:
        job.record(step)
        raise NonFiniteError(f"step {step.number}: {step.non_finite_reason()}; the update was not applied")

    with clock.phase("batch_wait"):
        complete = job.finish_ahead()
    if not complete:
        job.rollouts.drop_ahead()
    job.advance(step)
    if not complete:
        raise StopRequested
    if job.recovery.due_checkpoint():
        with clock.phase("checkpoint"):
            job.recovery.save_checkpoint()
    job.lane.release()
    with clock.phase("update_weights"), engines.phase("update_weights"):
        job.handover.update_weights()
        if job.handover.due_probe():
            job.handover.probe_weights()
    if job.due_evaluation():
        with clock.phase("batch_wait"):
            job.evaluate()
    job.record(step)
