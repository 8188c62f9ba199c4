"""The processes of a job: how one is made, where it is, and where its output goes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api import RLJobSpec, derived
from rljob_api.wire.names import ATTEMPT_VARIABLE, MANIFEST_VARIABLE
from rljob_worker.cluster.actor import Actor
from rljob_worker.cluster.groups import EngineGroup, JudgeGroup, Process, TrainerGroup
from rljob_worker.cluster.machine import compiler_variables, machine_variables, shared_cache
from rljob_worker.cluster.nodes import Nodes
from rljob_worker.cluster.placement import Spot
from rljob_worker.cluster.roles import Role
from rljob_worker.devices.kinds import device_kind
from rljob_worker.host.sockets import LOOPBACK
from rljob_worker.upstream.ray_node import FULL_PRIORITY
from rljob_worker.upstream.ray_types import remote_actor

Api = TypeVar("Api")
_SHARES = {False: 0.4, True: 0.3}
"""Part of a device that each process on it takes: without a judge there, and with one."""
ON_A_CLUSTER = {
    **FULL_PRIORITY,
    # The variables of a Ray job reach its actors; nobody there reads the manifest from them.
    MANIFEST_VARIABLE: "",
}
"""Variables of all processes on a cluster that was there before."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a process."""

    spot: Spot
    node: int
    """Position of its node among the job's."""
    devices: int
    """Devices of the job on that node."""


class Processes:
    """Makes processes of any role, and keeps trainers and engines.

    Args:
        spec: the job.
        run_folder: the driver's run folder, which all nodes see.
    """

    def __init__(self, spec: RLJobSpec, run_folder: Path) -> None:
        self.spec = spec
        self.trainers = TrainerGroup()
        self.engines = EngineGroup()
        self.judges = JudgeGroup()
        self.places: dict[str, Place] = {}
        """Present or last place of each process."""
        self.buckets = run_folder / "buckets"
        """Folder of weights on their way, where they go through one."""
        self.logs = run_folder / "logs"
        # A pod's own folders go with it: each engine would first spend seconds on looking at its model's class.
        self._cache = shared_cache(run_folder.parent) if ATTEMPT_VARIABLE in os.environ else None
        self._kind = device_kind(spec.resources)
        self._nodes: Nodes | None = None
        self.embedded = True
        self._hidden: dict[str, str] = {}

    def use(self, nodes: Nodes, embedded: bool, hidden: Mapping[str, str]) -> None:
        """Make processes on these nodes from now on.

        Args:
            nodes: of the job.
            embedded: whether all of them are the driver's machine.
            hidden: variables that the processes get when they run, and not from Ray.
        """
        self._nodes, self.embedded, self._hidden = nodes, embedded, dict(hidden)

    def make(
        self, role: Role[Api], name: str, place: Place, arguments: Mapping[str, object], visible: Sequence[str] = ()
    ) -> Process[Api]:
        """Make a process of a role, with the devices of its place.

        Args:
            role: what it is.
            name: of this process.
            place: where it runs.
            arguments: of its object.
            visible: what it is to see instead of its place's device, where it spans several.
        """
        # Ray names a process after its class.
        kind = type(f"{role.name.capitalize()}Actor", (Actor,), {})
        actor = remote_actor(kind, num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})
        variables = self._variables(role, place)
        if len(visible) > 1:
            assert self._kind.visible_variable is not None
            variables[self._kind.visible_variable] = ",".join(visible)
        self.places[name] = place
        api = "" if role.api is None else f"{role.api.__module__}:{role.api.__qualname__}"
        handle = actor.options(
            **self._share_of_device(),
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place.spot.group, placement_group_bundle_index=place.spot.bundle
            ),
        ).remote(str(self.log_file(name)), str(self.stacks_file(name)), api, arguments, self._hidden)
        return Process(name, handle, place.node)

    def log_file(self, name: str) -> Path:
        """Output of a process."""
        return self.logs / f"{name}.log"

    def stacks_file(self, name: str) -> Path:
        """Stacks of a process's threads."""
        return self.logs / f"{name}.stacks"

    def _share_of_device(self) -> dict[str, object]:
        """Processes take so little of their bundle's device each that all of them get that one."""
        share = _SHARES[derived.judge_model(self.spec) is not None]
        resource = self._kind.ray_resource
        if resource is None:
            return {}
        return {"num_gpus": share} if resource == "GPU" else {"resources": {resource: share}}

    def _variables(self, role: Role[Api], place: Place) -> dict[str, str]:
        if role.environment is None:
            return {} if self.embedded else dict(ON_A_CLUSTER)
        own = dict(role.environment(self.spec, self._cache))
        if self.embedded:
            own |= compiler_variables() | machine_variables(self.spec, trainer=role.memory_saver)
        if derived.trainer_nodes(self.spec) == 1:
            own = {"GLOO_SOCKET_IFNAME": LOOPBACK} | own
        if not self.embedded:
            own |= ON_A_CLUSTER
            if self.spec.resources.threads_per_device is None:
                # The driver's machine says nothing about the cores of this one.
                assert self._nodes is not None
                own["OMP_NUM_THREADS"] = str(max(1, int(self._nodes[place.node].cpus) // place.devices))
        return own | self.spec.environment.variables | dict(role.users(self.spec.environment))
