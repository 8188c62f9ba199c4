"""Trainers and engines on Ray: where they run, how they are called, how they end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api import RLJobSpec, derived
from rljob_worker.devices import get_device
from rljob_worker.driver.actors import EngineActor, TrainerActor
from rljob_worker.driver.calls import Call, Calls
from rljob_worker.errors import JobError
from rljob_worker.rollout.environment import engine_environment
from rljob_worker.trainer.environment import trainer_environment
from rljob_worker.types import GenerationRequest, SamplingParams

_LOG_TAIL_LINES = 20


@dataclass(slots=True)
class Process:
    """An actor with a name and, once started, a pid."""

    name: str
    handle: Any
    pid: int | None = None


class Cluster:
    """The job's processes: one trainer a device, one engine a `rollout.tensorParallel` group of devices.

    Engine `e` spans the devices of trainers `e * tp` to `e * tp + tp - 1`; the pairing is checked by device identity
    after start-up, since rank numbers say nothing about where a process landed.
    """

    def __init__(self, spec: RLJobSpec, run_folder: Path, model_folder: Path) -> None:
        self.spec = spec
        self.devices = derived.devices(spec)
        self._logs = run_folder / "logs"
        self._model_folder = model_folder
        self._group: PlacementGroup | None = None
        self.trainers: list[Process] = []
        self.engines: list[Process] = []

    def create(self, total_updates: int, sync_folder: Path) -> None:
        """Place all actors; they build themselves when `start` calls them."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._group = placement_group([{"CPU": 1}] * self.devices, strategy="PACK")
        ray.get(self._group.ready(), timeout=self.spec.timeouts.start_seconds)
        spec = self.spec.model_dump(mode="json", by_alias=True)
        given = self.spec.environment
        store = f"tcp://127.0.0.1:{_free_port()}"
        for rank in range(self.devices):
            arguments = dict(
                spec=spec,
                rank=rank,
                world_size=self.devices,
                store=store,
                model_folder=str(self._model_folder),
                total_updates=total_updates,
                sync_folder=str(sync_folder),
            )
            environment = trainer_environment(self.spec) | given.variables | given.trainer
            self.trainers.append(self._actor(TrainerActor, f"trainer-{rank}", rank, environment, arguments))
        tp = self.spec.rollout.tensor_parallel
        for index in range(derived.engines(self.spec)):
            bundles = range(index * tp, (index + 1) * tp)
            arguments = dict(
                spec=spec,
                index=index,
                model_folder=str(self._model_folder),
                devices=[get_device(self.spec.resources.profile.value, bundle).identity() for bundle in bundles],
                sync_folder=str(sync_folder),
            )
            environment = engine_environment(self.spec) | given.variables | given.rollout
            self.engines.append(self._actor(EngineActor, f"engine-{index}", bundles[0], environment, arguments))

    def _actor(
        self, kind: type, name: str, bundle: int, environment: dict[str, str], arguments: dict[str, Any]
    ) -> Process:
        assert self._group is not None
        # Ray's type hints do not know concurrency groups.
        remote: Any = ray.remote
        actor = remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(kind)
        handle = actor.options(
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        ).remote(str(self._log_file(name)), str(self._stacks_file(name)), **arguments)
        return Process(name, handle)

    def start(self, calls: Calls) -> None:
        """Build all processes side by side, and check that both sides sit on the same devices."""
        processes = [*self.trainers, *self.engines]
        running = [Call(p.name, p.handle.setup.remote()) for p in self.trainers]
        running += [Call(p.name, p.handle.start.remote()) for p in self.engines]
        reports = calls.gather("start", running, self.spec.timeouts.start_seconds, stoppable=True)
        for process, report in zip(processes, reports):
            process.pid = report["pid"]
        _check_pairing(reports[: len(self.trainers)], reports[len(self.trainers) :])

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

    def last_words(self, name: str) -> str:
        """The last lines of a process's log."""
        path = self._log_file(name)
        try:
            lines = path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(it wrote no log; expected {path})"
        return "\n".join(f"  {name} | {line}" for line in lines[-_LOG_TAIL_LINES:]) or f"(its log {path} is empty)"

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of all processes' threads below the log folder; returns the files."""
        for process in (*self.trainers, *self.engines):
            if process.pid is not None:
                try:
                    os.kill(process.pid, signal.SIGUSR2)
                except ProcessLookupError:
                    logging.getLogger(__name__).warning("%s (pid %d) is gone", process.name, process.pid)
        time.sleep(0.5)
        return [self._stacks_file(p.name) for p in (*self.trainers, *self.engines)]

    def shutdown(self, calls: Calls, seconds: float = 20.0) -> None:
        """Close everything that still answers, then end the processes."""
        try:
            calls.gather("shutdown", [*self.on_engines("shutdown"), *self.on_trainers("close")], seconds)
        except JobError as error:
            logging.getLogger(__name__).warning("unclean shutdown: %s", error)
        self.kill()

    def kill(self) -> None:
        """End all processes without asking."""
        for process in (*self.trainers, *self.engines):
            ray.kill(process.handle)
            if process.pid is not None:
                # Ray asks the process itself, which does not answer when it is stopped or hangs in a call.
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        if self._group is not None:
            remove_placement_group(self._group)

    def _log_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _stacks_file(self, name: str) -> Path:
        return self._logs / f"{name}.stacks"


def _check_pairing(trainers: Sequence[dict[str, Any]], engines: Sequence[dict[str, Any]]) -> None:
    """Trainer and engine ranks must sit on the same devices: each device once on either side."""
    training = sorted(report["device"] for report in trainers)
    serving = sorted(device for report in engines for device in report["devices"])
    if training != serving or len(set(training)) != len(training):
        raise JobError(f"start: trainers run on devices {training}, engines on {serving}; colocation needs the same")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
