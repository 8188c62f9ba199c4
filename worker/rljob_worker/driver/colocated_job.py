"""A job whose trainers and engines take turns on the same devices: what `loops.colocated` runs."""

from __future__ import annotations

from rljob_api import RLJobSpec
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.job import Generation, Job, Surroundings
from rljob_worker.driver.switch import Switch
from rljob_worker.rollouts.partial_rollouts import PartialRollouts
from rljob_worker.rollouts.rollouts import Rollouts
from rljob_worker.rollouts.tail_rollouts import TailRollouts


class ColocatedJob(Job[Rollouts, Switch]):
    """All phases are in one lane."""

    def __init__(self, given: Surroundings) -> None:
        spec = given.spec
        calls = PhaseCalls(given.calls, given.clock, spec.timeouts)
        super().__init__(given, Generation(_rollouts(spec), calls, given.stop), Switch)

    @property
    def switch(self) -> Switch:
        """The turns on the devices."""
        return self.handover


def _rollouts(spec: RLJobSpec) -> type[Rollouts]:
    if spec.rollout.partial is not None:
        return PartialRollouts
    return Rollouts if spec.rollout.tail is None else TailRollouts
