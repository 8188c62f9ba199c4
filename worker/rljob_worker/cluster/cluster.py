"""Trainers and engines on Ray: where they run, how they are called, how they end."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import ray
from ray.util.placement_group import remove_placement_group

from rljob_api import RLJobSpec, derived
from rljob_api.spec import WeightTransport
from rljob_api.wire.driver_status import EngineNodes
from rljob_worker.cluster.actor import Location
from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.cluster.elastic import Elastic, network_route
from rljob_worker.cluster.groups import Api, Group, Process
from rljob_worker.cluster.nodes import Nodes
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.cluster.placement import Placement, engines_alone, reserve_devices, without_judges
from rljob_worker.cluster.processes import ON_A_CLUSTER, Place, Processes
from rljob_worker.cluster.roles import ENGINE, JUDGE, ONLOOKER, TRAINER
from rljob_worker.devices.kinds import device_kind
from rljob_worker.engine.engine import Engine
from rljob_worker.engine.judge import JudgeEngine, JudgeStarted
from rljob_worker.errors import JobError, ProcessDiedError, UserError
from rljob_worker.host.files import log_tail
from rljob_worker.rewards.model_judge import ModelJudge
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.weightsync.routes import host_route

logger = logging.getLogger(__name__)
_LOG_TAIL_LINES = 20
_VISIBLE_SECONDS = 10.0
"""Seconds that a new file may take to show up on another node."""
_SIGNAL_SECONDS = 5.0
LEAVE_SECONDS = 2.0
"""Seconds for trainers and engines to leave once Ray stopped them; they take a fraction of a second."""


class Cluster:
    """The job's processes: one trainer a device, one engine a `rollout.tensorParallel` group of devices.

    Where trainers and engines share devices, engine `e` spans those of trainers `e * tp` to `e * tp + tp - 1`. Where
    each landed is checked by device identity after start-up, since rank numbers say nothing about it.

    Args:
        spec: the job.
        run_folder: the driver's run folder; on a cluster, all nodes must see it at the same path.
        model_folder: Hugging Face folder with the starting weights, likewise.
        checkpoints: folder of the checkpoints, likewise.
        on_change: called for engines that are lost, join and leave, with an event and its message.
        trains: whether there are trainers; False: engines alone, which keep the weights of `model_folder`.
        critic_folder: what the critic starts from, where that is another folder; likewise.
        teacher_folder: that of the teacher, where the algorithm has one; likewise.
        judge: whose model runs beside trainers and engines, where there is one; None: nor are devices reserved for it.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        run_folder: Path,
        model_folder: Path,
        checkpoints: Path,
        on_change: Callable[..., None] = lambda event, **about: None,
        *,
        trains: bool = True,
        critic_folder: Path | None = None,
        teacher_folder: Path | None = None,
        judge: ModelJudge | None = None,
    ) -> None:
        self.spec = spec
        groups = derived.node_groups(spec) if trains else engines_alone(spec)
        self._groups = groups if judge is not None else without_judges(groups)
        self._model_folder = model_folder
        self._critic_folder, self._teacher_folder, self._judge = critic_folder, teacher_folder, judge
        self._checkpoints = checkpoints
        self._made = Processes(spec, run_folder)
        self.trainers, self.engines, self.judges = self._made.trainers, self._made.engines, self._made.judges
        self._placement: Placement | None = None
        self._nodes: Nodes | None = None
        self._kind = device_kind(spec.resources)
        self._trains = trains
        self._shares_devices = trains and not derived.divides_devices(spec)
        self.engines_sleep_first = self._shares_devices and self._kind.ray_resource is not None
        """Whether engines are asleep after `start`."""
        self._on_change = on_change
        self._elastic: Elastic | None = None

    def create(
        self, calls: Calls, total_updates: int, stop: threading.Event, scratch: Path | None, hidden: Mapping[str, str]
    ) -> None:
        """Place all actors; they build themselves when `start` calls them.

        Args:
            calls: waits for what the actors say.
            total_updates: optimizer updates of the whole job.
            stop: set when the job was asked to stop.
            scratch: folder for the processes' sockets where all of them run on the driver's machine; None on a
                cluster that was there before.
            hidden: variables that the processes get when they run, and not from Ray.

        Raises:
            JobError: the devices are not to be had.
            UserError: a node does not see the job's folders; this machine alone has too few devices.
            StopRequested: the job was asked to stop meanwhile.
        """
        embedded = scratch is not None
        self._made.logs.mkdir(parents=True, exist_ok=True)
        seconds = self.spec.timeouts.start_seconds
        placement = self._placement = reserve_devices(self.spec, stop, more_may_join=not embedded, groups=self._groups)
        nodes = self._nodes = Nodes(placement, scratch, ON_A_CLUSTER)
        self._made.use(nodes, embedded, hidden)
        folders = nodes.folders(seconds)
        self._check_folders(nodes)
        store, secret = _meeting_place(self.spec, nodes, folders, seconds), secrets.token_hex(32)
        on_host, network = host_route(self.spec.weight_sync.transport), None
        if self._hands_over_network():
            # An attempt that was killed left its own.
            shutil.rmtree(self._made.buckets, ignore_errors=True)
            engines = len(ENGINE.devices(placement, self.spec))
            network = network_route(self.spec, nodes, engines, self._made.buckets)
        common: dict[str, object] = dict(
            spec=self.spec.model_dump(mode="json", by_alias=True), model_folder=str(self._model_folder)
        )
        devices = TRAINER.devices(placement, self.spec)
        for rank, (device, *_) in enumerate(devices):
            arguments: dict[str, object] = common | dict(
                rank=rank,
                world_size=len(devices),
                store=store,
                secret=secret,
                total_updates=total_updates,
                critic_folder=None if self._critic_folder is None else str(self._critic_folder),
                teacher_folder=None if self._teacher_folder is None else str(self._teacher_folder),
                route=network or on_host(folders[placement.node_of(device)]),
            )
            self.trainers.add(self._made.make(TRAINER, f"trainer-{rank}", self._place(device), arguments))
        visible = self._visible_devices(calls, placement)
        for index, spanned in enumerate(ENGINE.devices(placement, self.spec)):
            place = self._place(spanned.start)
            arguments = common | dict(
                index=index,
                devices=None if visible else list(map(placement.number_on_node, spanned)),
                folder=folders[place.node],
                route=network.at(nodes[place.node].address) if network else on_host(folders[place.node]),
            )
            shown = [visible[device] for device in spanned if visible]
            self.engines.add(self._made.make(ENGINE, f"engine-{index}", place, arguments, shown))
        self._make_judges(placement, bool(visible), folders)
        if network is not None and derived.may_lose_engines(self.spec):
            self._elastic = Elastic(self._made, nodes, network, common, calls, self._on_change)

    def _make_judges(self, placement: Placement, shown: bool, folders: Sequence[str]) -> None:
        if self._judge is None:
            return
        for index, (device, *_) in enumerate(JUDGE.devices(placement, self.spec)):
            place = self._place(device)
            arguments: dict[str, object] = dict(
                spec=self.spec.model_dump(mode="json", by_alias=True),
                model_folder=str(self._judge.folder),
                max_tokens=self._judge.facts.max_tokens,
                device=None if shown else placement.number_on_node(device),
                folder=folders[place.node],
            )
            self.judges.add(self._made.make(JUDGE, f"judge-{index}", place, arguments))

    def settle_engines(self, calls: PhaseCalls) -> None:
        """Before weights are handed over: take in engines that came anew, let go those that are gone."""
        if self._elastic is not None:
            self._elastic.settle(calls)

    def goes_on_without(self, error: ProcessDiedError, version: int, calls: PhaseCalls) -> bool:
        """End a hand-over in which a process died, where others go on without it; whether they do."""
        return self._elastic is not None and self._elastic.goes_on_without(error, version, calls)

    def want_engine_nodes(self, nodes: int) -> None:
        """Have another number of nodes with engines; thread-safe.

        Raises:
            UserError: the job does not allow it.
        """
        if self._elastic is None or not derived.is_elastic(self.spec):
            raise UserError(
                "the number of nodes with engines stays as it is: the job has no spec.resources.rollout.maxNodes"
            )
        self._elastic.want(nodes)

    def engine_nodes(self) -> EngineNodes | None:
        """Nodes with engines, where their number may change; thread-safe."""
        return self._elastic.in_use() if self._elastic is not None and derived.is_elastic(self.spec) else None

    def _place(self, device: int) -> Place:
        assert self._placement is not None
        node = self._placement.node_of(device)
        return Place(self._placement.spot(device), node, self._placement.holds[node].devices)

    def _hands_over_network(self) -> bool:
        """Whether a carrier brings weights to the engines: they are on other nodes, or on other devices with memory of
        their own, or the job names the way."""
        own_memory = derived.divides_devices(self.spec) and self._kind.ray_resource is not None
        chosen = self.spec.weight_sync.transport not in (WeightTransport.AUTO, WeightTransport.IN_PLACE)
        return self._trains and (derived.has_nodes_apart(self.spec) or own_memory or chosen)

    def _visible_devices(self, calls: Calls, placement: Placement) -> dict[int, str]:
        """Devices that Ray shows a process on each of the job's devices; empty where CPUs stand for devices.

        Ray exposes to an actor only the devices of its own bundle. An engine that spans bundles gets those of their
        trainers, or, where no trainer shares them, of short-lived onlookers.
        """
        variable = self._kind.visible_variable
        if variable is None:
            return {}
        trained = [device for device, *_ in TRAINER.devices(placement, self.spec)]
        others = [device for device, *_ in ONLOOKER.devices(placement, self.spec)]
        onlookers = Group[object]()
        for device in others:
            onlookers.add(self._made.make(ONLOOKER, f"onlooker-{device}", self._place(device), {}))
        asked = [*self.trainers.variable(variable), *onlookers.variable(variable)]
        shown = calls.gather("start", asked, self.spec.timeouts.start_seconds, until_stop=True)
        for process in onlookers:
            ray.kill(process.handle)
        for process, devices in zip((*self.trainers, *onlookers), shown, strict=True):
            if not devices or "," in devices:
                raise JobError(
                    f"start: Ray gave {process.name} {variable}={devices!r}, not one device: each node must offer Ray "
                    f"its devices as {self._kind.ray_resource}"
                )
        return dict(zip((*trained, *others), shown, strict=True))

    def _check_folders(self, nodes: Nodes) -> None:
        """Every node must see what the driver writes, and the model."""
        if self._made.embedded:
            return
        with ExitStack() as stack:
            judged = None if self._judge is None else self._judge.folder
            named = {"model": self._model_folder, "critic's model": self._critic_folder}
            named |= {"teacher's model": self._teacher_folder, "judge's model": judged}
            models = {str(folder): f"the {what}" for what, folder in named.items() if folder is not None}
            expected = dict(models)
            for folder, what in ((self._made.logs, "the run folder"), (self._checkpoints, "the checkpoints")):
                folder.mkdir(parents=True, exist_ok=True)
                marker = folder / f".seen-{uuid.uuid4().hex}"
                marker.touch()
                stack.callback(marker.unlink, missing_ok=True)
                expected[str(marker)] = what
            answers = nodes.missing(list(expected), _VISIBLE_SECONDS, 2 * _VISIBLE_SECONDS)
            for node, missing in enumerate(answers):
                for path in missing:
                    at = path if path in models else str(Path(path).parent)
                    raise UserError(
                        f"node {nodes[node]} does not see {expected[path]} of the driver at {at}: it must lie on a "
                        "volume that all pods mount at the same path (spec.storage.volumes)"
                    )

    def start(self, calls: Calls) -> None:
        """Build all processes, and check that each sits on the devices that are meant for it.

        Side by side on CPU. On devices that are shared the engines come first and sleep then: vLLM measures free memory
        while it starts, and refuses one that grows or is too little because of a trainer.
        """
        seconds = self.spec.timeouts.start_seconds
        # First of all: what hangs or is to be ended can be signalled by its pid alone.
        located = [*self.trainers.locate(), *self.engines.locate(), *self.judges.locate()]
        self._locate(calls.gather("start", located, seconds, until_stop=True))
        if self.engines_sleep_first:
            engines = calls.gather("start", self.engines.call(Engine.start), seconds, until_stop=True)
            calls.gather("start", self.engines.call(Engine.sleep), seconds, until_stop=True)
            judges = self._started_judges(calls, self.judges.call(JudgeEngine.start))
            trainers = calls.gather("start", self.trainers.call(Trainer.setup), seconds, until_stop=True)
        else:
            starting = self.judges.call(JudgeEngine.start)
            trainers, engines = calls.gather_both(
                "start", self.trainers.call(Trainer.setup), self.engines.call(Engine.start), seconds, until_stop=True
            )
            judges = self._started_judges(calls, starting)
        trained = self._seats(self.trainers, [(started.device,) for started in trainers])
        if judges:
            check_judges = check_apart if derived.judge_devices_per_node(self.spec) else check_pairing
            check_judges(trained, self._seats(self.judges, [(started.device,) for started in judges]), "judges")
        check = check_pairing if self._shares_devices else check_apart
        check(trained, self._seats(self.engines, [started.devices for started in engines]))

    def _seats(self, processes: Group[Api], devices: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
        """Node id and identity of each device of some processes."""
        assert self._placement is not None
        nodes = self._placement.nodes
        return [(nodes[process.node].id, device) for process, own in zip(processes, devices) for device in own]

    def _started_judges(self, calls: Calls, starting: Sequence[Call[JudgeStarted]]) -> list[JudgeStarted]:
        """A judge's processes when they have started; they sleep then, unless their devices are their own."""
        seconds = self.spec.timeouts.start_seconds
        judges = calls.gather("start", starting, seconds, until_stop=True)
        if not derived.judge_devices_per_node(self.spec):
            calls.gather("start", self.judges.call(JudgeEngine.sleep), seconds, until_stop=True)
        return judges

    def _locate(self, locations: Sequence[Location]) -> None:
        assert self._nodes is not None
        for process, found in zip((*self.trainers, *self.engines, *self.judges), locations, strict=True):
            process.pid = found.pid
            expected = self._nodes[process.node]
            if found.node != expected.id:
                raise JobError(f"start: {process.name} runs on node {found.node}, not on {expected}")

    def interrupt(self) -> None:
        """Tell running training and generation that they may end early."""
        self.trainers.beside(Trainer.request_stop)
        self.engines.beside(Engine.abort)
        self.judges.beside(JudgeEngine.abort)

    def death_of(self, name: str) -> str:
        """Place of a process's death, and the last lines of its log."""
        return f"{name} died{self._where(name)}\n{self._last_words(name)}"

    def _where(self, name: str) -> str:
        if self._made.embedded or self._nodes is None:
            return ""
        node = next((process.node for process in self._processes() if process.name == name), None)
        if node is None:
            return ""
        silent = "" if self._nodes.answers(node, _SIGNAL_SECONDS) else ", which does not answer any more"
        return f" on node {self._nodes[node]}{silent}"

    def _last_words(self, name: str) -> str:
        path = self._made.log_file(name)
        try:
            return log_tail(path, name, _LOG_TAIL_LINES) or f"(its log {path} is empty)"
        except OSError as error:
            return f"(its log {path} cannot be read: {error.strerror})"

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of all processes' threads below the log folder; returns the files."""
        if self._nodes is not None:
            for node, gone in self._nodes.signal(self._pids(), signal.SIGUSR2, _SIGNAL_SECONDS).items():
                if gone:
                    logger.warning("processes %s on node %s are gone", ", ".join(map(str, gone)), node)
        time.sleep(0.5)
        return [self._made.stacks_file(process.name) for process in (*self.trainers, *self.engines, *self.judges)]

    def _processes(self) -> list[Process[Trainer] | Process[Engine] | Process[JudgeEngine]]:
        return [
            *self.trainers,
            *self.engines,
            *self.judges,
            *(self._elastic.arrived if self._elastic is not None else ()),
        ]

    def _pids(self) -> dict[int, list[int]]:
        """Pids of all processes that have started, by node."""
        pids: dict[int, list[int]] = {}
        for process in self._processes():
            if process.pid is not None:
                pids.setdefault(process.node, []).append(process.pid)
        return pids

    def shutdown(self, calls: Calls, seconds: float = 20.0) -> None:
        """Close everything that still answers, then end the processes."""
        try:
            engines = self.engines.call(Engine.shutdown, process_ends=True)
            judges = self.judges.call(JudgeEngine.shutdown, process_ends=True)
            calls.gather("shutdown", [*engines, *judges, *self.trainers.call(Trainer.close)], seconds)
        except JobError as error:
            logger.warning("unclean shutdown: %s", error)
        self.kill(LEAVE_SECONDS)

    def kill(self, patience: float = 0.0, *, without_ray: bool = False) -> None:
        """End all processes without asking, and give the devices back.

        Args:
            patience: seconds that they have to leave when Ray tells them to. Of those that are killed before, Ray
                tells the user that a worker died by an unexpected error.
            without_ray: Ray itself is gone; on a cluster, nodes end the processes whose raylet is.
        """
        if self._elastic is not None:
            self._elastic.close()
        for process in self._processes():
            if not without_ray:
                ray.kill(process.handle)
        if self._nodes is not None and (self._made.embedded or not without_ray):
            # Ray asks the process itself, which does not answer when it is stopped or hangs in a call.
            self._nodes.end(self._pids(), patience, _SIGNAL_SECONDS)
            self._nodes.close(_SIGNAL_SECONDS)
        if without_ray:
            return
        if self._placement is not None:
            remove_placement_group(self._placement.group)
        if self._elastic is not None:
            self._elastic.give_back()


def _meeting_place(spec: RLJobSpec, nodes: Nodes, folders: Sequence[str], seconds: float) -> str:
    """Meeting place of the trainers: on one node a folder that is theirs alone, else the first node's address."""
    if derived.trainer_nodes(spec) == 1:
        return f"file://{folders[0]}/store"
    host = nodes[0].address
    port = nodes.free_port(0, seconds)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


Seats = Sequence[tuple[str, str]]
"""Node id and device identity of each rank of some processes."""


def check_pairing(trainers: Seats, engines: Seats, others: str = "engines") -> None:
    """Trainer and engine ranks must sit on the same devices of the same nodes: each device once on either side.

    `engines` may be other processes, which `others` names.
    """
    training, serving = sorted(trainers), sorted(engines)
    if training != serving or len(set(training)) != len(training):
        raise JobError(
            f"start: trainers run on devices {_listed(training)}, {others} on {_listed(serving)}; "
            "colocation needs the same"
        )


def check_apart(trainers: Seats, engines: Seats, others: str = "engines") -> None:
    """Each trainer and engine rank must have a device of its own; `others` as of `check_pairing`."""
    if len({*trainers, *engines}) != len(trainers) + len(engines):
        raise JobError(
            f"start: trainers run on devices {_listed(sorted(trainers))}, {others} on {_listed(sorted(engines))}; "
            "where they have devices of their own none is used twice"
        )


def _listed(devices: Seats) -> str:
    return ", ".join(f"{device} of node {node[:8]}" for node, device in devices)
