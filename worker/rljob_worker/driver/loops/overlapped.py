"""Mode `Async`: trainers and engines side by side, each at work all the time; staleness is bounded by admission."""

from __future__ import annotations

from rljob_worker.driver.learn import learn
from rljob_worker.driver.overlapped_job import OverlappedJob
from rljob_worker.errors import NonFiniteError, StopRequested
from rljob_worker.rollouts.step import Step


def train(job: OverlappedJob) -> None:
    """Run steps until the job is done; StopRequested when it was asked to stop before."""
    try:
        if job.due_initial_evaluation():
            job.evaluate_at_start()
        job.complete_restored_step()
        job.clock.restart()
        step = None if job.finished() else job.begin_step()
        while step is not None:
            if job.stopping():
                raise StopRequested
            step = train_step(job, step)
    finally:
        job.lane.close()


def train_step(job: OverlappedJob, step: Step) -> Step | None:
    """One step: train on what is ready, stop the engines for the new weights; returns the next one, begun by then."""
    clock, engines = job.clock, job.lane.clock
    with clock.phase("batch_wait"):
        job.take_batch(step)
    learn(job.training, clock, step, beside=job.write_samples)

    with clock.phase("batch_wait"):
        complete = job.pause(step)
    if not step.applied:
        job.describe(step)
        job.record(step)
        raise NonFiniteError(f"step {step.number}: {step.non_finite_reason()}; the update was not applied")
    job.advance(step)
    if not complete:
        job.describe(step)
        raise StopRequested
    job.lane.release()
    with clock.phase("update_weights"), engines.phase("update_weights"):
        job.handover.update_weights()
        if job.handover.due_probe():
            job.handover.probe_weights()
    if job.due_evaluation():
        with clock.phase("batch_wait"):
            job.evaluate()
    ahead = None if job.finished() else job.begin_step()
    job.describe(step)
    if job.recovery.due_checkpoint():
        with clock.phase("checkpoint"):
            job.recovery.save_checkpoint()
    job.record(step)
    return ahead
