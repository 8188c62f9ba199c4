"""Engines that only the network connects with the trainers: where they meet, and who comes and goes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rljob_api import RLJobSpec, derived
from rljob_api.spec import WeightTransport
from rljob_api.wire.driver_status import EngineNodes
from rljob_worker.cluster.actors import EngineActor
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.engine_pool import EnginePool
from rljob_worker.cluster.groups import EngineGroup, Process, TrainerGroup
from rljob_worker.cluster.nodes import Nodes
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.cluster.placement import Spot, reserve_engine
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import ProcessDiedError, UserError
from rljob_worker.flow import engine_seats
from rljob_worker.weightsync.meeting import NetworkMeeting, end_sync

_ANSWER_SECONDS = 5.0
_LEAVE_SECONDS = 2.0
"""What an engine that nobody needs may take to leave."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    spot: Spot
    node: int
    """Position of its node among the job's."""
    devices: int
    """Of the job on that node."""


class Processes(Protocol):
    """The job's cluster, as far as it is needed here."""

    spec: RLJobSpec
    trainers: TrainerGroup
    engines: EngineGroup
    places: dict[str, Place]
    buckets: Path

    def actor(self, kind: type, name: str, place: Place, arguments: Mapping[str, object]) -> Process:
        """Make a process."""
        ...


def meeting_at(spec: RLJobSpec, nodes: Nodes, engines: int, disk: Path) -> NetworkMeeting:
    """A new place at the first node's trainers where so many engines meet them; JobError: the node does not answer.

    Args:
        spec: the job.
        nodes: its nodes.
        engines: how many.
        disk: folder in which the buckets have one of their own, where they go through one.
    """
    address, seconds = nodes[0].address, spec.timeouts.start_seconds
    return NetworkMeeting(
        host=address,
        port=nodes.free_port(0, seconds),
        address=address,
        secret=secrets.token_hex(32),
        engines=engines,
        workers=spec.rollout.tensor_parallel,
        seconds=seconds,
        disk=str(disk / secrets.token_hex(8)) if spec.weight_sync.transport is WeightTransport.DISK else None,
    )


class EnginesApart:
    """Keeps the engines' group and the place where it meets the trainers up to date: some are lost, some come and go.

    Args:
        cluster: the job's processes.
        nodes: where they are; grows.
        network: where they meet at first.
        common: arguments of every engine.
        calls: waits for processes, of the thread that starts them.
        on_change: told of engines that are lost, that join and that leave.
    """

    def __init__(
        self,
        cluster: Processes,
        nodes: Nodes,
        network: NetworkMeeting,
        common: dict[str, object],
        calls: Calls,
        on_change: Callable[..., None],
    ) -> None:
        self._cluster, self._nodes, self._network = cluster, nodes, network
        self._common, self._calls = common, calls
        self._pool = EnginePool(cluster.engines, self._made, self._end, on_change)
        self._wanted = derived.engine_nodes(cluster.spec)
        self._groups: list[PlacementGroup] = []
        """Of engines that were made on other nodes than the job began with."""
        self._leaving: list[Process] = []
        cluster.engines.on_loss = self._pool.lose

    @property
    def arrived(self) -> list[Process]:
        """Engines that have started and take no part yet."""
        return self._pool.arrived

    def want(self, nodes: int) -> None:
        """Have so many nodes with engines from the next hand-over on, or as soon as there are so many; thread-safe.

        Raises:
            UserError: the job allows another number.
        """
        least, most = derived.engine_node_bounds(self._cluster.spec)
        if not least <= nodes <= most:
            raise UserError(
                f"{nodes} nodes with engines: the job allows {least} to {most} "
                "(spec.resources.rollout.minNodes and maxNodes)"
            )
        self._wanted = nodes

    def in_use(self) -> EngineNodes:
        """How many nodes with engines are wanted, and which are in use; thread-safe."""
        nodes, places = self._nodes, self._cluster.places
        part = {process.node for process in self._cluster.engines}
        others = {process.node for process in (*self._pool.arrived, *list(self._leaving))}
        coming = {place.node for name in self._pool.made if (place := places.get(name)) is not None}
        used = {nodes[node].id: nodes[node].address for node in (*part, *others, *coming)}
        return EngineNodes(self._wanted, len({nodes[node].id for node in part}), sorted(used.values()))

    def settle(self, calls: PhaseCalls) -> bool:
        """Take in engines that came, let go those that are gone or too many.

        Returns:
            Whether they are others than at the hand-over before, and meet the trainers in a new place.
        """
        self._pool.settle(calls)
        self._resize()
        if not self._pool.take_changed():
            return False
        trainers, engines = self._cluster.trainers, self._cluster.engines
        self._network = meeting_at(self._cluster.spec, self._nodes, len(engines), self._cluster.buckets)
        calls.gather("update_weights", trainers.meet(self._network))
        calls.gather("update_weights", engines.meet([self._seen_from(process.node) for process in engines]))
        return True

    def goes_on_without(self, error: ProcessDiedError, version: int, calls: PhaseCalls) -> bool:
        """End a hand-over in which a process died, where it was an engine and others go on; whether they do."""
        if error.process not in [process.name for process in self._cluster.engines]:
            return False
        end_sync(self._network, len(self._cluster.trainers), version, str(error).partition("\n")[0])
        return self.settle(calls)

    def close(self) -> None:
        """Make no more engines."""
        self._pool.close()

    def give_back(self) -> None:
        """Give the devices of those that were made back; they are ended."""
        for group in self._groups:
            remove_placement_group(group)

    def _resize(self) -> None:
        seats = {process.name: self._nodes[process.node].id for process in self._cluster.engines}
        per_node = derived.engines_per_node(self._cluster.spec)
        gone, new = engine_seats.change(seats, self._pool.made, self._wanted, per_node)
        for name in gone:
            self._pool.let_go(name)
        for name in new:
            self._pool.add(name)

    def _seen_from(self, node: int) -> NetworkMeeting:
        return replace(self._network, address=self._nodes[node].address)

    def _made(self, name: str, over: threading.Event) -> Process | None:
        """An engine of this name, started: where it was, or on a node that has its devices free.

        Returns:
            None when it is over before.

        Raises:
            JobError: it did not start.
        """
        spec = self._cluster.spec
        seconds, place = spec.timeouts.start_seconds, self._cluster.places.get(name)
        if place is None or not self._nodes.answers(place.node, _ANSWER_SECONDS):
            found = reserve_engine(spec, over)
            if found is None:
                return None
            group, node = found
            self._groups.append(group)
            own = derived.node_groups(spec)[-1]
            place = Place(Spot(group, 0), self._nodes.add(node, Spot(group, 0)), own.devices)
        told = device_kind(spec.resources).visible_variable is None
        arguments = self._common | dict(
            index=int(name.rpartition("-")[2]),
            devices=list(range(spec.rollout.tensor_parallel)) if told else None,
            sync_folder=self._nodes.folder(place.node, seconds),
            network=self._seen_from(place.node),
        )
        alone, calls = EngineGroup(), self._calls.beside(over, lambda: None)
        alone.add(process := self._cluster.actor(EngineActor, name, place, arguments))
        try:
            process.pid = calls.gather("start", alone.locate(), seconds, until_stop=True)[0].pid
            calls.gather("start", alone.start(), seconds, until_stop=True)
        except BaseException:
            ray.kill(process.handle)
            raise
        return process

    def _end(self, process: Process) -> None:
        """End an engine beside what goes on; its node is in use until it is gone."""
        self._leaving.append(process)
        threading.Thread(target=self._end_now, args=(process,), name=f"end-{process.name}", daemon=True).start()

    def _end_now(self, process: Process) -> None:
        places = self._cluster.places
        place = places[process.name]
        try:
            ray.kill(process.handle)
            if process.pid is not None:
                self._nodes.end({process.node: [process.pid]}, _LEAVE_SECONDS, _ANSWER_SECONDS)
            if place.spot.group in self._groups:
                self._groups.remove(place.spot.group)
                remove_placement_group(place.spot.group)
                # Unless another engine of this name has one by now.
                if places[process.name] is place:
                    del places[process.name]
        finally:
            self._leaving.remove(process)
