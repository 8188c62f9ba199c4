"""Outcome of a run, and the files that have to be on disk before it is reported."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.run_status import RunOutcome
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.errors import JobError, StoppedEarly, UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.events import EventLog
from rljob_worker.records.steps import RECORDS, StepLog
from rljob_worker.records.summary import summarize, write_summary
from rljob_worker.rollouts.inputs import Inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run."""

    exit_code: int
    outcome: RunOutcome
    message: str


def failed(error: Exception) -> Outcome:
    """The outcome that an error makes; of one that nobody foresaw the log has the traceback."""
    if isinstance(error, JobError | UserError):
        return Outcome(error.exit_code, RunOutcome.FAILED, str(error))
    if isinstance(error, OSError):
        logger.debug("ended by", exc_info=error)
        where = f"{error.filename}: " if error.filename else ""
        return Outcome(ExitCode.FAILED, RunOutcome.FAILED, f"{where}{error.strerror or error}")
    logger.error("an error of the driver itself", exc_info=error)
    said = f"{type(error).__name__}: {error} (an error of the driver itself; its log has the traceback)"
    return Outcome(ExitCode.FAILED, RunOutcome.FAILED, said)


def write_end(events: EventLog, error: BaseException) -> None:
    """Write the event of an attempt that `error` ends before it has an outcome."""
    if isinstance(error, StoppedEarly):
        events.write("end", outcome=RunOutcome.STOPPED)
    else:
        events.write("failed", message=f"{type(error).__name__}: {error}")


def with_all_records(outcome: Outcome, log: StepLog, failures: WriteFailures) -> Outcome:
    """A run is done when every reader of its steps can read them all; until then its last checkpoint has the rest.

    Raises:
        JobError: records wait to be written, and a later driver took the run over.
    """
    log.not_on_disk()
    if outcome.outcome is RunOutcome.SUCCEEDED and log.waiting:
        message = (
            f"{outcome.message} and all is saved, but {log.waiting} step records cannot be written: "
            f"{failures.last(RECORDS)}; --resume writes them where there is room"
        )
        return Outcome(ExitCode.FAILED, RunOutcome.FAILED, message)
    return outcome


def conclude(outcome: Outcome, folder: RunFolder, inputs: Inputs, log: StepLog, failures: WriteFailures) -> Outcome:
    """Write the summary, unless a later driver has the folder. A run is done when its summary says so.

    Raises:
        JobError: of a run that succeeded its owner cannot be determined now.
    """
    try:
        if folder.is_taken_over():
            return outcome
    except JobError:
        if outcome.outcome is RunOutcome.SUCCEEDED:
            raise
        return outcome
    skipped = {name: skipped.count for name, skipped in inputs.prompts.skipped().items()}
    summary = summarize(log.records(), outcome.outcome, outcome.message, folder.attempt, skipped, failures.counts())
    try:
        write_summary(folder.path, summary)
    except OSError as error:
        failures.note("the summary", error)
        if outcome.outcome is RunOutcome.SUCCEEDED:
            wrong = f"{error.filename}: {error.strerror}: {outcome.message} and all is saved, but not that it is done"
            return Outcome(ExitCode.FAILED, RunOutcome.FAILED, f"{wrong}; --resume says so where there is room")
    return outcome
