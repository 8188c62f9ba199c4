"""The Ray side of trainers and engines: process set-up, and one method for each thing that the driver asks of them."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray

from rljob_worker.engine.reports import DraftCounts, EngineSlept, EngineStarted, EngineWoke
from rljob_worker.host.files import keep_output_from_raising
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.reports import TrainerMemory, TrainerStarted
from rljob_worker.types import (
    Cut,
    EngineReport,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
    StepMetrics,
    TrainBatch,
    TrainerReport,
)
from rljob_worker.weightsync.meeting import NetworkMeeting

T = TypeVar("T")
Chunk = list[tuple[int, Generation]]
"""Responses that finished together, each with the index of its request."""
_CHUNK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A call's result, with the seconds that its process has computed so far."""

    value: T
    busy_seconds: float


def prepare_process(log_file: str, stacks_file: str) -> int:
    """Send this process's output to its log and make SIGUSR2 write all its threads' stacks; returns the pid."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    keep_output_from_raising()
    stacks = open(stacks_file, "a")  # noqa: SIM115  (faulthandler keeps the descriptor for the process's life)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable()
    return os.getpid()


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process runs."""

    pid: int
    node: str
    """Ray's id of it."""


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A step's batch in Ray's object store, where each trainer reads it once, whatever it is asked to do with it."""

    step: int
    ref: Any


class _Actor:
    """What trainers and engines have in common."""

    def __init__(self, log_file: str, stacks_file: str) -> None:
        self._pid = prepare_process(log_file, stacks_file)

    def location(self) -> Reply[Location]:
        """This process's pid and node."""
        return Reply(Location(self._pid, str(ray.get_runtime_context().get_node_id())), 0.0)

    def variable(self, name: str) -> Reply[str]:
        """A variable of this process's environment; empty where it is not set."""
        return Reply(os.environ.get(name, ""), 0.0)


class Onlooker(_Actor):
    """Sees what Ray shows a process on one device."""


class TrainerActor(_Actor):
    """One rank of the trainers; its methods are those of `trainer.Trainer`."""

    def __init__(self, log_file: str, stacks_file: str, **arguments: Any) -> None:
        super().__init__(log_file, stacks_file)
        # Imported beside whatever else starts; built when `setup` can say what is wrong with the arguments.
        from rljob_worker.trainer.trainer import Trainer

        self._make = lambda: Trainer(**arguments)
        self._batch: tuple[int, TrainBatch] | None = None

    def setup(self) -> Reply[TrainerStarted]:
        """Build the rank."""
        self._trainer = self._make()
        started = self._trainer.setup()
        # What is there now stays. Each sleep looks for garbage, and would look at 450,000 objects of imports: 0.25 s.
        gc.collect()
        gc.freeze()
        return self._reply(started)

    def sleep(self) -> Reply[TrainerMemory]:
        """Give memory away."""
        return self._reply(self._trainer.sleep())

    def wake_up(self) -> Reply[TrainerMemory]:
        """Take it back."""
        return self._reply(self._trainer.wake_up())

    def ref_log_probs(self, batch: BatchHandle, sampling: SamplingParams) -> Reply[None]:
        """Log-probabilities under the starting weights, kept there."""
        self._trainer.ref_log_probs(self._read(batch), sampling)
        return self._reply(None)

    def log_probs(self, batch: BatchHandle, sampling: SamplingParams) -> Reply[None]:
        """Log-probabilities before the updates, kept there."""
        self._trainer.log_probs(self._read(batch), sampling)
        return self._reply(None)

    def train(self, batch: BatchHandle, sampling: SamplingParams, version: int) -> Reply[StepMetrics]:
        """All optimizer updates of a step."""
        try:
            return self._reply(self._trainer.train(self._read(batch), sampling, version))
        finally:
            self._batch = None

    def score(self, token_lists: Sequence[IntArray]) -> Reply[list[FloatArray]]:
        """Log-probabilities of given tokens."""
        return self._reply(self._trainer.score(token_lists))

    def meet(self, network: NetworkMeeting) -> Reply[None]:
        """Find the engines there from now on."""
        self._trainer.meet(network)
        return self._reply(None)

    def send_weights(self, version: int, seconds: float) -> Reply[TrainerReport]:
        """Hand the weights to this host's engines."""
        return self._reply(self._trainer.send_weights(version, seconds))

    def save(self, folder: str) -> Reply[CheckedFile]:
        """Write this rank's state."""
        return self._reply(self._trainer.save(folder))

    def damage(self, folder: str, files: Sequence[CheckedFile]) -> Reply[str]:
        """Hold this rank's share of a checkpoint's files against what was written."""
        return self._reply(self._trainer.damage(folder, files))

    def load(self, folder: str) -> Reply[str]:
        """Continue from a saved state."""
        return self._reply(self._trainer.load(folder))

    def close(self) -> Reply[None]:
        """Leave the other ranks."""
        self._trainer.close()
        return self._reply(None)

    def request_stop(self) -> None:
        """Beside whatever is running: it may end early."""
        self._trainer.request_stop()

    def _read(self, batch: BatchHandle) -> TrainBatch:
        if self._batch is None or self._batch[0] != batch.step:
            self._batch = (batch.step, ray.get(batch.ref))
        return self._batch[1]

    def _reply(self, value: T) -> Reply[T]:
        return Reply(value, self._trainer.busy_seconds())


class EngineActor(_Actor):
    """One vLLM engine, on devices that are given by their numbers on its node, or by what the process sees.

    Its methods are those of `engine.engine.Engine`.
    """

    def __init__(self, log_file: str, stacks_file: str, *, devices: list[int] | None, **arguments: Any) -> None:
        super().__init__(log_file, stacks_file)
        from rljob_worker.devices import get_device
        from rljob_worker.engine.engine import Engine

        def make() -> Engine:
            profile = arguments["spec"]["resources"]["profile"]
            known = None if devices is None else [get_device(profile, index).identity() for index in devices]
            return Engine(devices=known, **arguments)

        self._make = make

    def start(self) -> Reply[EngineStarted]:
        """Load the model and answer a warm-up request."""
        self._engine = self._make()
        return self._reply(self._engine.start())

    def generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParams,
        version: int,
        more: bool,
        cut: Cut | None = None,
    ) -> Iterator[Reply[Chunk]]:
        """Stream (request index, response) as responses finish, so that they are scored while others still grow.

        With `more`, until the last requests of `submit` are done too; with `cut`, until that is reached, and then what
        was cut.
        """
        finished: queue.SimpleQueue[tuple[int, Generation] | BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._engine.generate(
                    requests, sampling, version, on_finished=lambda i, g: finished.put((i, g)), cut=cut, more=more
                )
                finished.put(None)
            except BaseException as error:
                finished.put(error)

        threading.Thread(target=run, name="generate", daemon=True).start()
        # No delegation: Ray sends values into the generator.
        for chunk in _chunks(finished):
            yield self._reply(chunk)

    def submit(self, requests: list[GenerationRequest], last: bool) -> Reply[None]:
        """Beside a generation: more requests for it, or word that these are the last."""
        self._engine.requests.submit(requests)
        if last:
            self._engine.requests.close()
        return self._reply(None)

    def score(self, token_lists: Sequence[IntArray]) -> Reply[list[FloatArray]]:
        """Log-probabilities of given tokens."""
        return self._reply(self._engine.score(token_lists))

    def take_draft_counts(self) -> Reply[DraftCounts]:
        """Guesses since the last time."""
        return self._reply(self._engine.take_draft_counts())

    def sleep(self) -> Reply[EngineSlept]:
        """Give back what can be given back."""
        return self._reply(self._engine.sleep())

    def wake_weights(self) -> Reply[EngineWoke]:
        """Take the memory for the weights back."""
        return self._reply(self._engine.wake_weights())

    def receive_weights(self, version: int, seconds: float) -> Reply[EngineReport]:
        """Take a version of the weights from the trainers of this host."""
        return self._reply(self._engine.receive_weights(version, seconds))

    def meet(self, network: NetworkMeeting, number: int) -> Reply[None]:
        """Find the trainers there from now on."""
        self._engine.meet(network, number)
        return self._reply(None)

    def wake_kv(self) -> Reply[EngineWoke]:
        """Take the KV cache back."""
        return self._reply(self._engine.wake_kv())

    def shutdown(self) -> Reply[None]:
        """Give everything back: this process is killed next."""
        self._engine.shutdown(process_ends=True)
        return self._reply(None)

    def harvest(self, version: int) -> None:
        """Beside whatever is running: generation with these weights returns what it has, and ends."""
        self._engine.harvest(version)

    def abort(self) -> None:
        """Beside whatever is running: generation may end early."""
        self._engine.abort()

    def _reply(self, value: T) -> Reply[T]:
        return Reply(value, self._engine.busy_seconds())


def _chunks(finished: queue.SimpleQueue[tuple[int, Generation] | BaseException | None]) -> Iterator[Chunk]:
    """Group what finishes within a short time: one message per response would cost more than it hides."""
    chunk: Chunk = []
    while True:
        try:
            item = finished.get(timeout=_CHUNK_SECONDS if chunk else None)
        except queue.Empty:
            yield chunk
            chunk = []
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            break
        chunk.append(item)
    if chunk:
        yield chunk
