"""Trainers and engines on Ray: where they run, how they are called, how they end."""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api import RLJobSpec, derived, roles
from rljob_worker.devices.kinds import device_kind
from rljob_worker.driver.actors import EngineActor, TrainerActor
from rljob_worker.driver.calls import Call, Calls
from rljob_worker.driver.nodes import Nodes
from rljob_worker.driver.placement import Node, Placement, place
from rljob_worker.errors import JobError, UserError
from rljob_worker.rollout.environment import engine_environment
from rljob_worker.trainer.environment import trainer_environment
from rljob_worker.types import GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)
_LOG_TAIL_LINES = 20
_VISIBLE_SECONDS = 10.0
"""How long a new file may take to show up on another node."""
_SIGNAL_SECONDS = 5.0
_SHARE = 0.4
_ON_A_CLUSTER = {
    # Ray makes its workers nice by default: beside anything else on the machine they would get a fraction of it.
    "RAY_worker_niceness": "0",
    # The variables of a Ray job reach its actors; nobody there reads the manifest from them.
    "RLJOB_MANIFEST": "",
}


@dataclass(slots=True)
class Process:
    """An actor with a name, its node's position among the job's nodes and, once started, a pid there."""

    name: str
    handle: Any
    node: int
    pid: int | None = None


class Cluster:
    """The job's processes: one trainer a device, one engine a `rollout.tensorParallel` group of devices.

    Engine `e` spans the devices of trainers `e * tp` to `e * tp + tp - 1`; the pairing is checked by device identity
    after start-up, since rank numbers say nothing about where a process landed.

    Args:
        spec: the job.
        run_folder: the driver's run folder; on a cluster, all nodes must see it at the same path.
        model_folder: Hugging Face folder with the starting weights, likewise.
        checkpoints: folder of the checkpoints, likewise.
    """

    def __init__(self, spec: RLJobSpec, run_folder: Path, model_folder: Path, checkpoints: Path) -> None:
        self.spec = spec
        self.devices = derived.devices(spec)
        self._logs = run_folder / "logs"
        self._model_folder = model_folder
        self._checkpoints = checkpoints
        self._embedded = True
        self._placement: Placement | None = None
        self._nodes: Nodes | None = None
        self._kind = device_kind(spec.resources)
        self.engines_sleep_first = self._kind.ray_resource is not None
        """Whether engines are asleep after `start`."""
        self.trainers: list[Process] = []
        self.engines: list[Process] = []

    def create(self, calls: Calls, total_updates: int, stop: threading.Event, scratch: Path | None) -> None:
        """Place all actors; they build themselves when `start` calls them.

        Args:
            calls: waits for what the actors say.
            total_updates: optimizer updates of the whole job.
            stop: set when the job was asked to stop.
            scratch: folder for the processes' sockets where all of them run on the driver's machine; None on a
                cluster that was there before.

        Raises:
            JobError: the devices are not to be had.
            UserError: a node does not see the job's folders.
            StopRequested: the job was asked to stop meanwhile.
        """
        self._embedded = scratch is not None
        self._logs.mkdir(parents=True, exist_ok=True)
        seconds = self.spec.timeouts.start_seconds
        placement = self._placement = place(self.spec, stop)
        nodes = self._nodes = Nodes(placement, scratch, _ON_A_CLUSTER)
        folders = nodes.ask_all("folder", seconds=seconds)
        self._check_folders(nodes)
        port = nodes.ask(0, "free_port", seconds=seconds)
        host = "127.0.0.1" if self._embedded else nodes[0].address
        common = dict(spec=self.spec.model_dump(mode="json", by_alias=True), model_folder=str(self._model_folder))
        for rank in range(self.devices):
            arguments = common | dict(
                rank=rank,
                world_size=self.devices,
                store=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
                total_updates=total_updates,
                sync_folder=folders[placement.node_of(rank)],
            )
            self.trainers.append(self._actor(TrainerActor, f"trainer-{rank}", rank, arguments))
        tp = self.spec.rollout.tensor_parallel
        visible = self._visible_devices(calls)
        for index in range(derived.engines(self.spec)):
            first = index * tp
            arguments = common | dict(
                index=index,
                devices=None
                if visible
                else [device % placement.devices_per_node for device in range(first, first + tp)],
                sync_folder=folders[placement.node_of(first)],
            )
            self.engines.append(
                self._actor(EngineActor, f"engine-{index}", first, arguments, visible[first : first + tp])
            )

    def _visible_devices(self, calls: Calls) -> list[str]:
        """What Ray shows each trainer of the devices of its node; empty where CPUs stand for devices.

        Ray shows an actor the devices of its own bundle. An engine that spans bundles is told those of their trainers.
        """
        variable = self._kind.visible_variable
        if variable is None:
            return []
        asked = [Call(process.name, process.handle.variable.remote(variable)) for process in self.trainers]
        shown: list[str] = calls.gather("start", asked, self.spec.timeouts.start_seconds, until_stop=True)
        for process, devices in zip(self.trainers, shown, strict=True):
            if not devices or "," in devices:
                raise JobError(
                    f"start: Ray gave {process.name} {variable}={devices!r}, not one device: each node must offer Ray "
                    f"its devices as {self._kind.ray_resource}"
                )
        return shown

    def _check_folders(self, nodes: Nodes) -> None:
        """Every node must see what the driver writes, and the model."""
        if self._embedded:
            return
        with ExitStack() as stack:
            expected = {str(self._model_folder): "the model"}
            for folder, what in ((self._logs, "the run folder"), (self._checkpoints, "the checkpoints")):
                folder.mkdir(parents=True, exist_ok=True)
                marker = folder / f".seen-{uuid.uuid4().hex}"
                marker.touch()
                stack.callback(marker.unlink, missing_ok=True)
                expected[str(marker)] = what
            answers = nodes.ask_all("missing", list(expected), _VISIBLE_SECONDS, seconds=2 * _VISIBLE_SECONDS)
            for node, missing in enumerate(answers):
                for path in missing:
                    at = path if path == str(self._model_folder) else str(Path(path).parent)
                    raise UserError(
                        f"node {nodes[node]} does not see {expected[path]} of the driver at {at}: it must lie on a "
                        "volume that all pods mount at the same path (spec.storage.volumes)"
                    )

    def _actor(
        self, kind: type, name: str, bundle: int, arguments: dict[str, Any], visible: Sequence[str] = ()
    ) -> Process:
        assert self._placement is not None
        node = self._placement.node_of(bundle)
        # Ray's type hints do not know concurrency groups.
        remote: Any = ray.remote
        actor = remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(kind)
        variables = self._variables(kind, self._placement.nodes[node])
        if len(visible) > 1:
            assert self._kind.visible_variable is not None
            variables[self._kind.visible_variable] = ",".join(visible)
        handle = actor.options(
            **self._share_of_device(),
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement.group, placement_group_bundle_index=bundle
            ),
        ).remote(str(self._log_file(name)), str(self._stacks_file(name)), **arguments)
        return Process(name, handle, node)

    def _share_of_device(self) -> dict[str, Any]:
        """Trainer and engine take less than half of their bundle's device each, so that both get that one."""
        resource = self._kind.ray_resource
        if resource is None:
            return {}
        return {"num_gpus": _SHARE} if resource == "GPU" else {"resources": {resource: _SHARE}}

    def _variables(self, kind: type, node: Node) -> dict[str, str]:
        given = self.spec.environment
        if kind is TrainerActor:
            own, users = trainer_environment(self.spec) | roles.trainer_variables(self.spec), given.trainer
        else:
            own, users = engine_environment(self.spec) | roles.engine_variables(self.spec), given.rollout
        if not self._embedded:
            own |= _ON_A_CLUSTER
            if self.spec.resources.threads_per_device is None:
                # The driver's machine says nothing about the cores of this one.
                own["OMP_NUM_THREADS"] = str(max(1, int(node.cpus) // derived.devices_per_node(self.spec)))
        return own | given.variables | users

    def start(self, calls: Calls) -> None:
        """Build all processes, and check that both sides sit on the same devices.

        Side by side on CPU. On devices the engines come first and sleep then: vLLM measures free memory while it
        starts, and refuses one that grows or is too little because of a trainer.
        """
        processes = [*self.trainers, *self.engines]
        seconds = self.spec.timeouts.start_seconds
        # First of all: what hangs or is to be ended can be signalled by its pid alone.
        asked = [Call(process.name, process.handle.place.remote()) for process in processes]
        places = calls.gather("start", asked, seconds, until_stop=True)
        assert self._placement is not None
        for process, found in zip(processes, places, strict=True):
            process.pid = found["pid"]
            expected = self._placement.nodes[process.node]
            if found["node"] != expected.id:
                raise JobError(f"start: {process.name} runs on node {found['node']}, not on {expected}")

        def engines() -> list[Call]:
            return [Call(p.name, p.handle.start.remote()) for p in self.engines]

        def trainers() -> list[Call]:
            return [Call(p.name, p.handle.setup.remote()) for p in self.trainers]

        if self.engines_sleep_first:
            serving = calls.gather("start", engines(), seconds, until_stop=True)
            calls.gather("start", self.on_engines("sleep"), seconds, until_stop=True)
            reports = [*calls.gather("start", trainers(), seconds, until_stop=True), *serving]
        else:
            reports = calls.gather("start", [*trainers(), *engines()], seconds, until_stop=True)
        reports = [{**found, **report} for found, report in zip(places, reports, strict=True)]
        check_pairing(reports[: len(self.trainers)], reports[len(self.trainers) :])

    def on_trainers(self, method: str, *args: Any, **kwargs: Any) -> list[Call]:
        """Start one method on every trainer."""
        return [Call(p.name, p.handle.call.remote(method, *args, **kwargs)) for p in self.trainers]

    def on_engines(self, method: str, *args: Any, **kwargs: Any) -> list[Call]:
        """Start one method on every engine."""
        return [Call(p.name, p.handle.call.remote(method, *args, **kwargs)) for p in self.engines]

    def generate(self, shares: Sequence[list[GenerationRequest]], sampling: SamplingParams, version: int) -> list[Call]:
        """Start one stream of finished responses on each engine."""
        return [
            Call(p.name, p.handle.generate.options(num_returns="streaming").remote(share, sampling, version))
            for p, share in zip(self.engines, shares)
        ]

    def interrupt(self) -> None:
        """Tell running training and generation that they may end early."""
        for trainer in self.trainers:
            trainer.handle.control.options(concurrency_group="control").remote("request_stop")
        for engine in self.engines:
            engine.handle.control.options(concurrency_group="control").remote("abort")

    def death_of(self, name: str) -> str:
        """Where a process died, and the last lines of its log."""
        return f"{name} died{self._where(name)}\n{self._last_words(name)}"

    def _where(self, name: str) -> str:
        if self._embedded or self._nodes is None:
            return ""
        node = next(process.node for process in (*self.trainers, *self.engines) if process.name == name)
        silent = "" if self._nodes.answers(node, _SIGNAL_SECONDS) else ", which does not answer any more"
        return f" on node {self._nodes[node]}{silent}"

    def _last_words(self, name: str) -> str:
        path = self._log_file(name)
        try:
            lines = path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(it wrote no log; expected {path})"
        return "\n".join(f"  {name} | {line}" for line in lines[-_LOG_TAIL_LINES:]) or f"(its log {path} is empty)"

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of all processes' threads below the log folder; returns the files."""
        if self._nodes is not None:
            for node, gone in self._nodes.signal(self._pids(), signal.SIGUSR2, _SIGNAL_SECONDS).items():
                if gone:
                    logger.warning("processes %s on node %s are gone", ", ".join(map(str, gone)), node)
        time.sleep(0.5)
        return [self._stacks_file(p.name) for p in (*self.trainers, *self.engines)]

    def _pids(self) -> dict[int, list[int]]:
        """Pids of all processes that have started, by node."""
        pids: dict[int, list[int]] = {}
        for process in (*self.trainers, *self.engines):
            if process.pid is not None:
                pids.setdefault(process.node, []).append(process.pid)
        return pids

    def shutdown(self, calls: Calls, seconds: float = 20.0) -> None:
        """Close everything that still answers, then end the processes."""
        try:
            calls.gather("shutdown", [*self.on_engines("shutdown"), *self.on_trainers("close")], seconds)
        except JobError as error:
            logger.warning("unclean shutdown: %s", error)
        self.kill()

    def kill(self) -> None:
        """End all processes without asking, and give the devices back."""
        for process in (*self.trainers, *self.engines):
            ray.kill(process.handle)
        if self._nodes is not None:
            # Ray asks the process itself, which does not answer when it is stopped or hangs in a call.
            self._nodes.end(self._pids(), _SIGNAL_SECONDS)
            self._nodes.close(_SIGNAL_SECONDS)
        if self._placement is not None:
            remove_placement_group(self._placement.group)

    def _log_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _stacks_file(self, name: str) -> Path:
        return self._logs / f"{name}.stacks"


def check_pairing(trainers: Sequence[dict[str, Any]], engines: Sequence[dict[str, Any]]) -> None:
    """Trainer and engine ranks must sit on the same devices of the same nodes: each device once on either side."""
    training = sorted((report["node"], report["device"]) for report in trainers)
    serving = sorted((report["node"], device) for report in engines for device in report["devices"])
    if training != serving or len(set(training)) != len(training):
        raise JobError(
            f"start: trainers run on devices {_listed(training)}, engines on {_listed(serving)}; "
            "colocation needs the same"
        )


def _listed(devices: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{device} of node {node[:8]}" for node, device in devices)
