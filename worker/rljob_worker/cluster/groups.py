"""The job's trainers and engines as two groups, with a method for each thing that the driver asks of all their members.

A method starts the calls; `calls.Calls` waits for their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from rljob_worker.cluster.actors import BatchHandle, Chunk, EngineActor, Location, Onlooker, Reply, TrainerActor
from rljob_worker.cluster.calls import Call
from rljob_worker.engine.reports import DraftCounts, EngineSlept, EngineStarted, EngineWoke
from rljob_worker.errors import ProcessDiedError
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.reports import TrainerMemory, TrainerStarted
from rljob_worker.types import (
    Cut,
    EngineReport,
    FloatArray,
    GenerationRequest,
    IntArray,
    SamplingParams,
    StepMetrics,
    TrainBatch,
    TrainerReport,
)
from rljob_worker.upstream.ray_types import method_of
from rljob_worker.weightsync.meeting import NetworkMeeting

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


@dataclass(slots=True)
class Process:
    """An actor with a name, its node's position among the job's nodes and, once started, a pid there."""

    name: str
    handle: ActorHandle[object]
    node: int
    pid: int | None = None


class _Group:
    def __init__(self) -> None:
        self.processes: list[Process] = []

    def __iter__(self) -> Iterator[Process]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    def __getitem__(self, number: int) -> Process:
        return self.processes[number]

    def add(self, process: Process) -> None:
        """Take a member in; they are numbered in this order."""
        self.processes = [*self.processes, process]

    def remove(self, name: str) -> Process | None:
        """Let a member go; None where there is none of that name. Another thread may go through them meanwhile."""
        gone = next((process for process in self.processes if process.name == name), None)
        self.processes = [process for process in self.processes if process is not gone]
        return gone

    def _all(self, method: Callable[Concatenate[A, P], Reply[T]], *args: P.args, **kwargs: P.kwargs) -> list[Call[T]]:
        return [
            Call(process.name, method_of(process.handle, method).remote(*args, **kwargs)) for process in self.processes
        ]

    def _beside(self, method: Callable[Concatenate[A, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have every member run a thread-safe method beside whatever is running; nobody waits for it."""
        for process in self.processes:
            method_of(process.handle, method).options(concurrency_group="control").remote(*args, **kwargs)


def _nobody_goes_on(error: ProcessDiedError) -> None:
    raise error


class OnlookerGroup(_Group):
    """Processes that look at a device each."""

    def variable(self, name: str) -> list[Call[str]]:
        """Ask for a variable of their environments."""
        return self._all(Onlooker.variable, name)


class TrainerGroup(_Group):
    """All trainers, by rank."""

    def locate(self) -> list[Call[Location]]:
        """Ask where they run."""
        return self._all(TrainerActor.location)

    def variable(self, name: str) -> list[Call[str]]:
        """Ask for a variable of their environments."""
        return self._all(TrainerActor.variable, name)

    def setup(self) -> list[Call[TrainerStarted]]:
        """Build them."""
        return self._all(TrainerActor.setup)

    def put(self, step: int, batch: TrainBatch) -> BatchHandle:
        """Lay a step's batch into Ray's object store, for all that it is used for."""
        return BatchHandle(step, ray.put(batch))

    def sleep(self) -> list[Call[TrainerMemory]]:
        """Give the devices' memory away."""
        return self._all(TrainerActor.sleep)

    def wake_up(self) -> list[Call[TrainerMemory]]:
        """Take it back."""
        return self._all(TrainerActor.wake_up)

    def ref_log_probs(self, batch: BatchHandle, sampling: SamplingParams) -> list[Call[None]]:
        """Compute log-probabilities under the starting weights, for the coming `train`."""
        return self._all(TrainerActor.ref_log_probs, batch, sampling)

    def log_probs(self, batch: BatchHandle, sampling: SamplingParams) -> list[Call[None]]:
        """Compute log-probabilities before the updates, for the coming `train`."""
        return self._all(TrainerActor.log_probs, batch, sampling)

    def train(self, batch: BatchHandle, sampling: SamplingParams, version: int) -> list[Call[StepMetrics]]:
        """Do all optimizer updates of a step, which lead to weight `version`."""
        return self._all(TrainerActor.train, batch, sampling, version)

    def score(self, token_lists: Sequence[IntArray]) -> list[Call[list[FloatArray]]]:
        """Compute the log-probability of each token but the first."""
        return self._all(TrainerActor.score, token_lists)

    def meet(self, network: NetworkMeeting) -> list[Call[None]]:
        """Have them find the engines there."""
        return self._all(TrainerActor.meet, network)

    def send_weights(self, version: int, seconds: float) -> list[Call[TrainerReport]]:
        """Hand the weights to the engines within so many seconds."""
        return self._all(TrainerActor.send_weights, version, seconds)

    def save(self, folder: str) -> list[Call[CheckedFile]]:
        """Write every rank's state."""
        return self._all(TrainerActor.save, folder)

    def damage(self, folder: str, files: Sequence[CheckedFile]) -> list[Call[str]]:
        """Say what is wrong with a checkpoint's files, each read by one rank; empty where nothing is."""
        return self._all(TrainerActor.damage, folder, files)

    def load(self, folder: str) -> list[Call[str]]:
        """Continue from a saved state; say how it was resharded."""
        return self._all(TrainerActor.load, folder)

    def close(self) -> list[Call[None]]:
        """Leave one another in order."""
        return self._all(TrainerActor.close)

    def request_stop(self) -> None:
        """A running step may end early."""
        self._beside(TrainerActor.request_stop)


class EngineGroup(_Group):
    """All engines, in the order of the devices that they span."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loss: Callable[[ProcessDiedError], None] = _nobody_goes_on
        """Told of a process that died; raises it again unless it was an engine without which the others go on."""

    def locate(self) -> list[Call[Location]]:
        """Ask where they run."""
        return self._all(EngineActor.location)

    def start(self) -> list[Call[EngineStarted]]:
        """Load the model."""
        return self._all(EngineActor.start)

    def generate(
        self,
        shares: Sequence[list[GenerationRequest]],
        sampling: SamplingParams,
        version: int,
        *,
        more: bool = False,
        cuts: Sequence[Cut] | None = None,
    ) -> list[Call[Chunk]]:
        """Start one stream of finished responses on each engine, for `Calls.stream`.

        With `more`, streams end when the last requests of `submit` are done; with `cuts`, each at its engine's.
        """
        of_engines = [None] * len(shares) if cuts is None else cuts
        return [
            Call(
                process.name,
                method_of(process.handle, EngineActor.generate)
                .options(num_returns="streaming")
                .remote(share, sampling, version, more=more, cut=cut),
            )
            for process, share, cut in zip(self.processes, shares, of_engines)
        ]

    def submit(self, engine: int, requests: list[GenerationRequest], *, last: bool) -> list[Call[None]]:
        """Give a generating engine more requests; the last ones are the last for all engines."""
        return [
            Call(
                process.name,
                method_of(process.handle, EngineActor.submit)
                .options(concurrency_group="control")
                .remote(requests if number == engine else [], last=last),
            )
            for number, process in enumerate(self.processes)
            if last or number == engine
        ]

    def score(self, token_lists: Sequence[IntArray]) -> list[Call[list[FloatArray]]]:
        """Compute the log-probability of each token but the first."""
        return self._all(EngineActor.score, token_lists)

    def take_draft_counts(self) -> list[Call[DraftCounts]]:
        """Ask for the guesses of speculative decoding since the last time."""
        return self._all(EngineActor.take_draft_counts)

    def sleep(self) -> list[Call[EngineSlept]]:
        """Give weights and KV cache back."""
        return self._all(EngineActor.sleep)

    def wake_weights(self) -> list[Call[EngineWoke]]:
        """Take the memory for the weights back."""
        return self._all(EngineActor.wake_weights)

    def receive_weights(self, version: int, seconds: float) -> list[Call[EngineReport]]:
        """Take a version of the weights from the trainers within so many seconds."""
        return self._all(EngineActor.receive_weights, version, seconds)

    def wake_kv(self) -> list[Call[EngineWoke]]:
        """Take the KV cache back."""
        return self._all(EngineActor.wake_kv)

    def meet(self, networks: Sequence[NetworkMeeting]) -> list[Call[None]]:
        """Have each find the trainers where its own meeting says, by its number here."""
        return [
            Call(process.name, method_of(process.handle, EngineActor.meet).remote(network, number))
            for number, (process, network) in enumerate(zip(self.processes, networks, strict=True))
        ]

    def shutdown(self) -> list[Call[None]]:
        """Give everything back."""
        return self._all(EngineActor.shutdown)

    def harvest(self, version: int) -> None:
        """Generation with these weights ends; its streams return what they have of each response."""
        self._beside(EngineActor.harvest, version)

    def abort(self) -> None:
        """Running generation may end early."""
        self._beside(EngineActor.abort)
