"""Engines that only the network connects with the trainers: their route, and which of them come and go.

The others go on when an engine is lost, and new ones are made in threads of their own.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rljob_api import RLJobSpec, derived
from rljob_api.how_many import how_many
from rljob_api.wire.driver_status import EngineNodes
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.groups import Process
from rljob_worker.cluster.nodes import Nodes
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.cluster.placement import Spot, reserve_engine
from rljob_worker.cluster.processes import Place, Processes
from rljob_worker.cluster.roles import ENGINE
from rljob_worker.devices.kinds import device_kind
from rljob_worker.engine.engine import Engine
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested, UserError
from rljob_worker.records.event_names import ENGINE_JOINED, ENGINE_LEFT, ENGINE_LOST
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.weightsync import routes
from rljob_worker.weightsync.meeting import NetworkMeeting, end_sync
from rljob_worker.weightsync.routes import NetworkRoute

logger = logging.getLogger(__name__)
_AGAIN_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_LEAVE_SECONDS = 2.0
"""Time for an engine that is not needed to leave."""


def change_of_seats(
    seats: Mapping[str, str], made: Collection[str], nodes: int, engines_per_node: int
) -> tuple[list[str], list[str]]:
    """Choose the engines to release, and the new ones to make, for so many nodes full of engines.

    Nodes are given back whole: those with the fewest engines first, of two the one whose engines joined later. Before
    any engine that takes part, those go that are still being made.

    Args:
        seats: node of each engine that takes part, in the order in which they joined; at least one.
        made: engines that are being made, in the order in which that began.
        nodes: how many are wanted, at least 1.
        engines_per_node: on each.

    Returns:
        Names of those that are released, and of new ones: `engine-N` with the smallest free numbers.
    """
    by_node: dict[str, list[str]] = {}
    for engine, node in seats.items():
        by_node.setdefault(node, []).append(engine)
    fewest_last = sorted(by_node.values(), key=len, reverse=True)
    kept, gone = fewest_last[:nodes], [engine for engines in fewest_last[nodes:] for engine in engines]
    missing = max(0, nodes * engines_per_node - sum(map(len, kept)))
    gone += list(made)[missing:]
    taken = {*seats, *made}
    numbers = (f"engine-{number}" for number in range(len(taken) + missing))
    new = [name for name in numbers if name not in taken][: max(0, missing - len(made))]
    return gone, new


def network_route(spec: RLJobSpec, nodes: Nodes, engines: int, disk: Path) -> NetworkRoute:
    """A new route from the first node's trainers to so many engines; JobError: the node does not answer.

    Args:
        spec: the job.
        nodes: its nodes.
        engines: how many.
        disk: folder in which the buckets have one of their own, where they go through one.
    """
    address, seconds = nodes[0].address, spec.timeouts.start_seconds
    meeting = NetworkMeeting(
        host=address,
        port=nodes.free_port(0, seconds),
        address=address,
        secret=secrets.token_hex(32),
        engines=engines,
        workers=spec.rollout.tensor_parallel,
        seconds=seconds,
    )
    return routes.network_route(spec.weight_sync.transport).made(meeting, disk)


class Elastic:
    """Keeps the engines' group, and the place where it meets the trainers, up to date.

    The thread that generates reports lost engines. The trainers' thread admits new ones and releases surplus ones
    between two rounds of generation. Threads of their own make new ones meanwhile.

    Args:
        processes: of the job; its group of engines changes.
        nodes: where they are; grows.
        route: the first one.
        common: arguments of every engine.
        calls: waits for processes, of the thread that starts them.
        on_change: called for each change with the event's name and the engine's.
    """

    def __init__(
        self,
        processes: Processes,
        nodes: Nodes,
        route: NetworkRoute,
        common: dict[str, object],
        calls: Calls,
        on_change: Callable[..., None],
    ) -> None:
        self._processes, self._engines = processes, processes.engines
        self._nodes, self._route = nodes, route
        self._common, self._calls, self._on_change = common, calls, on_change
        self._wanted = derived.engine_nodes(processes.spec)
        self._groups: list[PlacementGroup] = []
        """Placement groups of engines that were made on other nodes than the job began with."""
        self._leaving: list[Process[Engine]] = []
        self._lock = threading.Lock()
        self._closed = self._changed = False
        self._arrived: list[Process[Engine]] = []
        self._made: dict[str, threading.Event] = {}
        """Engines that are being made, each with what ends that."""
        self._engines.on_loss = self.lose

    @property
    def arrived(self) -> list[Process[Engine]]:
        """Engines that have started and take no part yet."""
        with self._lock:
            return list(self._arrived)

    @property
    def made(self) -> list[str]:
        """Names of those that are being made."""
        with self._lock:
            return list(self._made)

    def want(self, nodes: int) -> None:
        """Have so many nodes with engines from the next hand-over on, or as soon as there are so many; thread-safe.

        Raises:
            UserError: the job allows another number.
        """
        least, most = derived.engine_node_bounds(self._processes.spec)
        if not least <= nodes <= most:
            raise UserError(
                f"{how_many(nodes, 'node')} with engines: the job allows {least} to {most} "
                "(spec.resources.rollout.minNodes and maxNodes)"
            )
        self._wanted = nodes

    def in_use(self) -> EngineNodes:
        """Number of nodes with engines that are wanted, and those in use; thread-safe."""
        nodes, places = self._nodes, self._processes.places
        part = {process.node for process in self._engines}
        others = {process.node for process in (*self.arrived, *list(self._leaving))}
        coming = {place.node for name in self.made if (place := places.get(name)) is not None}
        used = {nodes[node].id: nodes[node].address for node in (*part, *others, *coming)}
        return EngineNodes(self._wanted, len({nodes[node].id for node in part}), sorted(used.values()))

    def settle(self, calls: PhaseCalls) -> bool:
        """Admit engines that came, release those that are gone or too many.

        Returns:
            Whether they are others than at the hand-over before, and have a new route.
        """
        self.admit(calls)
        self._resize()
        if not self.take_changed():
            return False
        processes = self._processes
        self._route = network_route(processes.spec, self._nodes, len(self._engines), processes.buckets)
        calls.gather("update_weights", processes.trainers.call(Trainer.take_route, self._route))
        met = [
            process.call(Engine.take_route, self._seen_from(process.node), number)
            for number, process in enumerate(self._engines)
        ]
        calls.gather("update_weights", met)
        return True

    def goes_on_without(self, error: ProcessDiedError, version: int, calls: PhaseCalls) -> bool:
        """End a hand-over in which a process died, where it was an engine and others go on; whether they do."""
        if error.process not in [process.name for process in self._engines]:
            return False
        end_sync(self._route.meeting, len(self._processes.trainers), version, str(error).partition("\n")[0])
        return self.settle(calls)

    def lose(self, error: ProcessDiedError) -> None:
        """Go on without an engine that died, and make a new one.

        Raises:
            ProcessDiedError: it was the last one, or is no engine.
        """
        name = error.process
        if len(self._engines) == 1 or self._engines.remove(name) is None:
            raise error
        self._changed = True
        left = ", ".join(process.name for process in self._engines)
        logger.warning("%s\n%s: without it, until a new one has started", error, left)
        self._on_change(ENGINE_LOST, engine=name, left=len(self._engines))
        self.add(name)

    def add(self, name: str) -> None:
        """Make an engine; it takes part when it has started."""
        over = threading.Event()
        with self._lock:
            if self._closed:
                return
            self._made[name] = over
        threading.Thread(target=self._make_one, args=(name, over), name=f"make-{name}", daemon=True).start()

    def release(self, name: str) -> None:
        """Do without an engine, whether it takes part, has just come or is being made; while none generates."""
        with self._lock:
            waiting = self._made.pop(name, None)
            came = next((process for process in self._arrived if process.name == name), None)
            self._arrived = [process for process in self._arrived if process is not came]
        if waiting is not None:
            waiting.set()
            return
        gone = came or self._engines.remove(name)
        assert gone is not None, f"{name} is not there"
        if came is None:
            self._changed = True
            logger.info("%s is not needed any more", name)
            self._on_change(ENGINE_LEFT, engine=name, left=len(self._engines))
        self._end(gone)

    def admit(self, calls: PhaseCalls) -> None:
        """Find out which engines are there, while none generates.

        Raises:
            ProcessDiedError: none is.
        """
        for call in self._engines.locate():
            try:
                calls.gather("update_weights", [call])
            except ProcessDiedError as error:
                self.lose(error)
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for process in arrived:
            self._engines.add(process)
            self._changed = True
            logger.info("%s takes part", process.name)
            self._on_change(ENGINE_JOINED, engine=process.name)

    def take_changed(self) -> bool:
        """Whether those that take part are others than the last time that this was asked."""
        changed, self._changed = self._changed, False
        return changed

    def close(self) -> None:
        """Make no more engines."""
        with self._lock:
            self._closed = True
            for over in self._made.values():
                over.set()

    def give_back(self) -> None:
        """Give the devices of those that were made back; they are ended."""
        for group in self._groups:
            remove_placement_group(group)

    def _resize(self) -> None:
        seats = {process.name: self._nodes[process.node].id for process in self._engines}
        per_node = derived.engines_per_node(self._processes.spec)
        gone, new = change_of_seats(seats, self.made, self._wanted, per_node)
        for name in gone:
            self.release(name)
        for name in new:
            self.add(name)

    def _seen_from(self, node: int) -> NetworkRoute:
        return self._route.at(self._nodes[node].address)

    def _make_one(self, name: str, over: threading.Event) -> None:
        while not over.is_set():
            try:
                process = self._make(name, over)
            except StopRequested:
                return
            except JobError as error:
                logger.warning("%s did not start, and is made anew: %s", name, error)
                over.wait(_AGAIN_SECONDS)
                continue
            if process is None:
                return
            with self._lock:
                if not over.is_set():
                    del self._made[name]
                    self._arrived.append(process)
                    return
            self._end(process)

    def _make(self, name: str, over: threading.Event) -> Process[Engine] | None:
        """An engine of this name, started: where it was, or on a node that has its devices free.

        Returns:
            None when it is over before.

        Raises:
            JobError: it did not start.
        """
        spec = self._processes.spec
        seconds, place = spec.timeouts.start_seconds, self._processes.places.get(name)
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
            folder=self._nodes.folder(place.node, seconds),
            route=self._seen_from(place.node),
        )
        calls, process = self._calls.beside(over, lambda: None), self._processes.make(ENGINE, name, place, arguments)
        try:
            process.pid = calls.gather("start", [process.location()], seconds, until_stop=True)[0].pid
            calls.gather("start", [process.call(Engine.start)], seconds, until_stop=True)
        except BaseException:
            ray.kill(process.handle)
            raise
        return process

    def _end(self, process: Process[Engine]) -> None:
        """End an engine beside what goes on; its node is in use until it is gone."""
        self._leaving.append(process)
        threading.Thread(target=self._end_now, args=(process,), name=f"end-{process.name}", daemon=True).start()

    def _end_now(self, process: Process[Engine]) -> None:
        places = self._processes.places
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
