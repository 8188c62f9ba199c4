"""Errors that end a job, each with the exit code that the operator's failure policy sees."""

from __future__ import annotations

from pathlib import Path

from rljob_api.wire.exit_codes import ExitCode


class UserError(ValueError):
    """Something the user wrote is wrong; the message names it and says what would be right."""

    exit_code = ExitCode.USER_ERROR


class AwayError(UserError):
    """A server or a process that the manifest names does not answer now; a run that began with it may be tried again
    later."""


class JobError(RuntimeError):
    """The job cannot go on."""

    exit_code = ExitCode.FAILED


class PhaseDeadlineError(JobError):
    """A phase took longer than its deadline."""

    exit_code = ExitCode.DEADLINE


class ProcessDiedError(JobError):
    """A trainer or engine process ended unexpectedly."""

    def __init__(self, message: str, process: str = "") -> None:
        super().__init__(message)
        self.process = process
        """Its name."""


class RayLostError(JobError):
    """A process of Ray's own ended: calls that wait for it may never return."""


class FencedError(JobError):
    """A later driver of the same job took its folder over: this one was given up and may not change anything there."""


class NonFiniteError(JobError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class StopRequested(Exception):
    """Unwinds a step when the job was asked to stop."""

    exit_code = ExitCode.STOPPED


class StoppedEarly(KeyboardInterrupt):
    """The process was asked to stop (SIGTERM) before there was anything to save.

    Whatever lets Ctrl-C through lets it through too.
    """

    exit_code = ExitCode.STOPPED

    def __str__(self) -> str:
        return "stopped as asked, before anything was started"


class WeightSyncError(JobError):
    """A weight sync failed; engines that took part are unusable until a later sync succeeds."""

    exit_code = ExitCode.WEIGHT_SYNC


def no_folder(path: Path) -> str:
    """Say why a path is no folder: something else lies there, or nothing."""
    return f"{path}: is no folder" if path.exists() else f"{path}: there is no such folder"
