"""Which job and which loop a mode is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rljob_api.spec import Mode
from rljob_worker.driver.colocated_job import ColocatedJob
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.lockstep_job import LockstepJob
from rljob_worker.driver.loops import colocated, lockstep, overlapped
from rljob_worker.driver.overlapped_job import OverlappedJob

J = TypeVar("J", bound=Job[Any])


@dataclass(frozen=True, slots=True)
class Schedule(Generic[J]):
    """A mode: its job, and the loop that runs it."""

    job: Callable[[Surroundings], J]
    train: Callable[[J], None]


SCHEDULES: Mapping[Mode, Schedule[Any]] = {
    Mode.COLOCATED: Schedule(ColocatedJob, colocated.train),
    Mode.DISAGGREGATED: Schedule(LockstepJob, lockstep.train),
    Mode.ASYNC: Schedule(OverlappedJob, overlapped.train),
}
