"""A job whose trainers and engines take turns on the same devices: what `loops.colocated` runs."""

from __future__ import annotations

from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.job import Generation, Job, Surroundings
from rljob_worker.driver.switch import Switch


class ColocatedJob(Job[Switch]):
    """All phases are in one lane."""

    def __init__(self, given: Surroundings) -> None:
        spec = given.spec
        calls = PhaseCalls(given.calls, given.clock, spec.timeouts)
        super().__init__(given, Generation(calls, given.stop), Switch)

    @property
    def switch(self) -> Switch:
        """The turns on the devices."""
        return self.handover
