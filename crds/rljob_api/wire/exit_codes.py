"""Exit codes of the driver and of the command line (docs/running.md)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the driver, which the operator's failure policy reads, and of `rljob`'s other commands."""

    OK = 0
    """The job succeeded."""
    FAILED = 1
    """The job failed, and the message says why."""
    USER_ERROR = 2
    """The manifest, its data or the command line is wrong: a restart cannot help."""
    DEADLINE = 4
    """A phase was past its deadline."""
    WEIGHT_SYNC = 5
    """A weight hand-over failed, or its verification found wrong weights."""
    STOPPED = 75
    """A stop request was obeyed: the last completed step is saved, `--resume` continues (sysexits.h: EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """Ctrl-C before anything was started: 128 and SIGINT, as a shell says it."""
