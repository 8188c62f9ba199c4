"""Errors that end a job, each with the exit code that the operator's failure policy sees."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_DEADLINE = 4
EXIT_WEIGHT_SYNC = 5
EXIT_STOPPED = 75
"""A stop request was obeyed: the last completed step is saved and `--resume` continues (EX_TEMPFAIL of sysexits.h)."""


class UserError(ValueError):
    """Something the user wrote is wrong; the message names it and says what would be right."""

    exit_code = EXIT_USER_ERROR


class JobError(RuntimeError):
    """The job cannot go on."""

    exit_code = EXIT_FAILED


class PhaseDeadlineError(JobError):
    """A phase took longer than its deadline."""

    exit_code = EXIT_DEADLINE


class ProcessDiedError(JobError):
    """A trainer or engine process ended unexpectedly."""


class NonFiniteError(JobError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class StopRequested(Exception):
    """Unwinds a step when the job was asked to stop."""

    exit_code = EXIT_STOPPED
