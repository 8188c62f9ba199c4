"""Processes of a role as a group, and the typed calls of their objects' methods.

A call is started here and waited for by `calls.Calls`: `trainers.call(Trainer.train, batch, sampling, version)` starts
`train` on each trainer and gives a `Call[StepMetrics]` of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ray.actor import ActorHandle

from rljob_worker.cluster.actor import Actor, Location
from rljob_worker.cluster.calls import Call
from rljob_worker.engine.engine import Chunk, Engine
from rljob_worker.engine.judge import JudgeEngine
from rljob_worker.errors import ProcessDiedError
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import Cut, GenerationRequest, SamplingParams
from rljob_worker.upstream.ray_types import method_of

P = ParamSpec("P")
T = TypeVar("T")
Api = TypeVar("Api")


@dataclass(slots=True)
class Process(Generic[Api]):
    """An actor with a name, its node's position among the job's nodes and, once started, a pid there."""

    name: str
    handle: ActorHandle[object]
    node: int
    pid: int | None = None

    def call(self, method: Callable[Concatenate[Api, P], T], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Start a method after those that were started before."""
        return self._start(Actor.call, method, args, kwargs)

    def stream(self, method: Callable[Concatenate[Api, P], Iterator[T]], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Start a generator, for `Calls.stream`."""
        return self._start(Actor.stream, method, args, kwargs, num_returns="streaming")

    def beside(self, method: Callable[Concatenate[Api, P], T], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Start a thread-safe method beside whatever is running."""
        return self._start(Actor.beside, method, args, kwargs, concurrency_group="control")

    def location(self) -> Call[Location]:
        """Ask where it runs."""
        return Call(self.name, method_of(self.handle, Actor.location).remote())

    def variable(self, name: str) -> Call[str]:
        """Ask for a variable of its environment."""
        return Call(self.name, method_of(self.handle, Actor.variable).remote(name))

    def _start(
        self,
        way: Callable[..., object],
        method: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        **options: object,
    ) -> Call[Any]:
        # Ray shows the name as the process's title while it runs.
        named = method_of(self.handle, way).options(name=f"{self.name}.{method.__name__}", **options)
        sent = time.time()
        return Call(self.name, named.remote(method.__name__, *args, **kwargs), sent)


class Group(Generic[Api]):
    """The processes of a role, in the order of their numbers."""

    def __init__(self) -> None:
        self.processes: list[Process[Api]] = []

    def __iter__(self) -> Iterator[Process[Api]]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    def __getitem__(self, number: int) -> Process[Api]:
        return self.processes[number]

    def add(self, process: Process[Api]) -> None:
        """Take a member in; they are numbered in this order."""
        self.processes = [*self.processes, process]

    def remove(self, name: str) -> Process[Api] | None:
        """Remove a member; None where there is none of that name. Another thread may iterate over them meanwhile."""
        gone = next((process for process in self.processes if process.name == name), None)
        self.processes = [process for process in self.processes if process is not gone]
        return gone

    def call(self, method: Callable[Concatenate[Api, P], T], *args: P.args, **kwargs: P.kwargs) -> list[Call[T]]:
        """Start a method on every member."""
        return [process.call(method, *args, **kwargs) for process in self.processes]

    def beside(self, method: Callable[Concatenate[Api, P], T], *args: P.args, **kwargs: P.kwargs) -> list[Call[T]]:
        """Start a thread-safe method on every member beside whatever is running."""
        return [process.beside(method, *args, **kwargs) for process in self.processes]

    def locate(self) -> list[Call[Location]]:
        """Ask where they run."""
        return [process.location() for process in self.processes]

    def variable(self, name: str) -> list[Call[str]]:
        """Ask for a variable of their environments."""
        return [process.variable(name) for process in self.processes]


TrainerGroup = Group[Trainer]
"""All trainers, by rank."""
JudgeGroup = Group[JudgeEngine]
"""All processes of a judge's model, in the order of their devices."""


def _nobody_goes_on(error: ProcessDiedError) -> None:
    raise error


class EngineGroup(Group[Engine]):
    """All engines, in the order of the devices that they span."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loss: Callable[[ProcessDiedError], None] = _nobody_goes_on
        """Called for a process that died; raises it again unless it was an engine without which the others go on."""

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
            process.stream(Engine.stream, share, sampling, version, cut=cut, more=more)
            for process, share, cut in zip(self.processes, shares, of_engines)
        ]

    def submit(self, engine: str, requests: list[GenerationRequest], *, last: bool) -> list[Call[bool]]:
        """Give a generating engine more requests, by its name; the last ones are the last for all engines.

        One that is no member any more gets nothing.
        """
        return [
            process.beside(Engine.submit, requests if process.name == engine else [], last=last)
            for process in self.processes
            if last or process.name == engine
        ]
