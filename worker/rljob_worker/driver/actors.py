"""The Ray side of trainers and engines: process set-up, and calls forwarded to the classes that do the work."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rljob_worker.types import Generation, GenerationRequest, SamplingParams

_CHUNK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Reply:
    """A call's result, with the seconds that its process has computed so far."""

    value: Any
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
    stacks = open(stacks_file, "a")  # noqa: SIM115  (faulthandler keeps the descriptor for the process's life)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable()
    return os.getpid()


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


class TrainerActor:
    """One Megatron rank."""

    def __init__(self, log_file: str, stacks_file: str, **arguments: Any) -> None:
        self.pid = prepare_process(log_file, stacks_file)
        # Imported beside whatever else starts; built when `setup` can say what is wrong with the arguments.
        from rljob_worker.trainer.trainer import Trainer

        self._make = lambda: Trainer(**arguments)

    def place(self) -> dict[str, Any]:
        """This process's pid and node."""
        return {"pid": self.pid, "node": _node()}

    def variable(self, name: str) -> str:
        """A variable of this process's environment; empty where it is not set."""
        return os.environ.get(name, "")

    def setup(self) -> dict[str, Any]:
        """Build the rank; returns its device identity and sizes."""
        self._trainer = self._make()
        return self._trainer.setup()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Reply:
        """Run one method of the trainer."""
        return Reply(getattr(self._trainer, method)(*args, **kwargs), self._trainer.busy_seconds())

    def control(self, method: str, *args: Any) -> Any:
        """Run a thread-safe method beside whatever is running."""
        return getattr(self._trainer, method)(*args)


class EngineActor:
    """One vLLM engine, on devices that are given by their numbers on its node, or by what the process sees."""

    def __init__(self, log_file: str, stacks_file: str, *, devices: list[int] | None, **arguments: Any) -> None:
        self.pid = prepare_process(log_file, stacks_file)
        from rljob_worker.devices import get_device
        from rljob_worker.rollout.engine import Engine

        def make() -> Engine:
            profile = arguments["spec"]["resources"]["profile"]
            known = None if devices is None else [get_device(profile, index).identity() for index in devices]
            return Engine(devices=known, **arguments)

        self._make = make

    def place(self) -> dict[str, Any]:
        """This process's pid and node."""
        return {"pid": self.pid, "node": _node()}

    def start(self) -> dict[str, Any]:
        """Load the model and answer a warm-up request."""
        self._engine = self._make()
        return self._engine.start()

    def generate(
        self, requests: list[GenerationRequest], sampling: SamplingParams, version: int
    ) -> Iterator[list[tuple[int, Generation]]]:
        """Stream (request index, response) as responses finish, so that they are scored while others still grow."""
        finished: queue.SimpleQueue[tuple[int, Generation] | BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._engine.generate(requests, sampling, version, on_finished=lambda i, g: finished.put((i, g)))
                finished.put(None)
            except BaseException as error:
                finished.put(error)

        threading.Thread(target=run, name="generate", daemon=True).start()
        yield from _chunks(finished)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Reply:
        """Run one method of the engine."""
        return Reply(getattr(self._engine, method)(*args, **kwargs), self._engine.busy_seconds())

    def control(self, method: str, *args: Any) -> Any:
        """Run a thread-safe method beside whatever is running."""
        return getattr(self._engine, method)(*args)


def _chunks(
    finished: queue.SimpleQueue[tuple[int, Generation] | BaseException | None],
) -> Iterator[list[tuple[int, Generation]]]:
    """Group what finishes within a short time: one message per response would cost more than it hides."""
    chunk: list[tuple[int, Generation]] = []
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
