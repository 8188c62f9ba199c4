"""A job from manifest to exit code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rljob_api import RLJob, RLJobSpec
from rljob_worker.checkpoints.run_folder import Resume, RunFolder
from rljob_worker.cluster.machine import check_machine
from rljob_worker.data.row_store import RowStore
from rljob_worker.devices import COMPUTE_VARIABLE, check_profile
from rljob_worker.driver.attempt import Attempt
from rljob_worker.driver.inputs import read_inputs
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.loops import LOOPS
from rljob_worker.driver.outcome import Outcome, conclude, write_end
from rljob_worker.driver.preflight import apply_environment, check_layout, check_port, check_trackers
from rljob_worker.errors import AwayError, JobError, UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.events import EventLog
from rljob_worker.records.steps import StepLog
from rljob_worker.records.writer import Sink
from rljob_worker.rollouts.inputs import Inputs

logger = logging.getLogger(__name__)


def run_job(
    job: RLJob,
    output: Path,
    *,
    resume: Resume,
    address: str | None = None,
    on_record: Sink,
    on_event: Callable[[str], None],
    loop: Callable[[Surroundings], Job[Any]] | None = None,
    engines_alone: bool = False,
    check: Callable[[RLJobSpec, Inputs], None] = lambda spec, inputs: None,
) -> Outcome:
    """Run a validated job in a run folder.

    Args:
        job: the job; without `address` it must be of one node.
        output: run folder, made when it does not exist; with `address`, one that all nodes see at the same path.
        resume: continue the run that the folder holds.
        address: Ray cluster to run on; None: one that is started here for this job alone.
        on_record: called with each step's record.
        on_event: called with a sentence about what the job is doing.
        loop: what is done with its processes; None: that of its mode.
        engines_alone: start no trainers; nothing is saved then.
        check: refuses, by a UserError, what `loop` cannot use.

    Raises:
        UserError: model, data, reward or run folder are not what the manifest says; nothing was started.
        JobError: a run is to be continued, and a server that it needs is away.
    """
    apply_environment(job.spec)
    try:
        check_profile(job.spec.resources.profile.value)
    except ValueError as error:
        raise UserError(str(error)) from None
    check_layout(job.spec)
    if os.environ.get(COMPUTE_VARIABLE):
        on_event(f"computing on the CPU, whatever the profile is: {COMPUTE_VARIABLE} is set")
    if address is None:
        check_machine(job.spec)
    check_trackers(job.spec)
    check_port(job.spec.records.http_host, job.spec.records.http_port)
    with ExitStack() as stack:
        folder = RunFolder(output, job, resume)
        stack.callback(folder.close)
        if folder.is_new and (seen := folder.open_to_others()):
            on_event(f"other users of this machine can read {' and '.join(map(str, seen))} (chmod 700 shuts them out)")
        on_event("reading model, tokenizer and data")
        with _before_the_attempt(folder):
            inputs = read_inputs(job.spec, folder.path, saves=not engines_alone)
            _check_same_data(folder, inputs)
            check(job.spec, inputs)
            inputs.labels.run()
            if folder.attempt == 1:
                inputs.labels.refuse()
        stack.callback(inputs.rewards.close)
        if inputs.group_filter is not None:
            stack.callback(inputs.group_filter.close)
        for hosts in inputs.hosts:
            stack.callback(hosts.close)
        failures = WriteFailures()
        log = StepLog(folder.path, failures, folder.check)
        stack.callback(log.close)
        made = loop or LOOPS[job.spec.mode]
        attempt = Attempt(
            job, folder, inputs, log, failures, on_record, on_event, made, engines_alone, address, loop is None
        )
        return conclude(attempt.run(), folder, inputs, log, failures)


@contextmanager
def _before_the_attempt(folder: RunFolder) -> Iterator[None]:
    """However this block ends, a new folder is left as it was, and one that is continued has an event of it."""
    try:
        yield
    except BaseException as error:
        if folder.is_new:
            folder.discard_if_new()
            raise
        said = JobError(str(error)) if isinstance(error, AwayError) else error
        try:
            events = EventLog(folder.path, folder.attempt)
            write_end(events, said)
            events.close()
        except OSError as unwritten:
            logger.warning("%s: %s: no event says how the attempt ended", unwritten.filename, unwritten.strerror)
        if said is error:
            raise
        raise said from None


def _check_same_data(folder: RunFolder, inputs: Inputs) -> None:
    """A resumed run on other data, or from checkpoints that cannot be verified, would be refused when the cluster has
    started."""
    store = RowStore(folder.path)
    inputs.prompts.compare_rows(store)
    checkpoints = folder.checkpoints()
    for one in checkpoints.candidates():
        try:
            cursor = checkpoints.read(one.step).data_cursor
        except (JobError, UserError):
            # Damaged: restoring sets it aside by name and takes the one before.
            continue
        inputs.prompts.check(cursor)
        break
    inputs.prompts.remember_rows(store)
