"""Requests to engines and their results: the one caller of their generation."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rljob_api import RLJobSpec
from rljob_api.how_many import how_many
from rljob_worker.cluster.groups import EngineGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.engine.arguments import max_sequences
from rljob_worker.engine.engine import Engine
from rljob_worker.engine.reports import DraftCounts
from rljob_worker.errors import JobError, ProcessDiedError
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.rollouts.asked import Asked, More
from rljob_worker.rollouts.policies.base import Fleet
from rljob_worker.types import Cut, Generation, GenerationRequest, SamplingParams

K = TypeVar("K")


class Generator:
    """Asks engines for responses.

    Args:
        spec: the job.
        engines: all of them.
        calls: waits for them.
    """

    def __init__(self, spec: RLJobSpec, engines: EngineGroup, calls: PhaseCalls) -> None:
        self._spec = spec
        self._engines = engines
        self._calls = calls
        self._newest: Occupancy | None = None
        self.longest: dict[str, int] = {}
        """Tokens of the longest response to a prompt when it was seen last, by the prompt's uid."""

    @property
    def fleet(self) -> Fleet:
        """The engines as an assignment needs them."""
        return Fleet(len(self._engines), max_sequences(self._spec), self.longest)

    def occupancy(self) -> Occupancy:
        """A new count, of what is asked for from here on."""
        self._newest = Occupancy(len(self._engines), max_sequences(self._spec))
        return self._newest

    def loads(self) -> dict[str, int]:
        """Responses that each engine is asked for and did not return yet, by its name; thread-safe."""
        now = self._newest
        return {process.name: 0 if now is None else now.left(process.name) for process in self._engines}

    def responses(
        self,
        shares: Sequence[Sequence[tuple[K, GenerationRequest]]],
        sampling: SamplingParams,
        version: int,
        occupancy: Occupancy,
        *,
        cuts: Sequence[Cut] | None = None,
        waiting: Sequence[Sequence[tuple[K, GenerationRequest]]] = (),
        each: bool = False,
        lost: list[str] | None = None,
    ) -> Iterator[list[tuple[K, Generation]]]:
        """Responses in chunks that ended together, each with the key of its request.

        Args:
            shares: for each engine, keys and requests.
            sampling: how responses are drawn.
            version: of the engines' weights.
            occupancy: counts requests and responses.
            cuts: for each engine, where it stops; what it was asked for is then returned as far as it is.
            waiting: requests of groups that no engine has; for each group that an engine completes it gets one of
                these, after the chunk was used.
            each: the phase's deadline is that of each chunk.
            lost: gets the names of engines that died and without which the others go on; the rest of what they had is
                missing then. None: the first error is raised.

        Raises:
            JobError: responses are missing, and no engine was lost.
        """
        given, queue = [list(share) for share in shares], deque(waiting)
        asked = came = sum(map(len, given)) + sum(map(len, waiting))
        if not asked:
            return
        growing = Counter(request.group for part in (*given, *waiting) for _, request in part)

        def lose(error: ProcessDiedError) -> None:
            if lost is None:
                raise error
            self.goes_on_without(error)
            lost.append(error.process)
            occupancy.lost(error.process, time.monotonic())

        parts = [[request for _, request in part] for part in given]
        streams = self._engines.generate(parts, sampling, version, more=bool(queue), cuts=cuts)
        names = [process.name for process in self._engines]
        for name, part in zip(names, parts):
            occupancy.given(name, len(part), time.monotonic())
        for engine, chunk in self._calls.stream("eval", streams, each=each, lost=lose):
            occupancy.came(names[engine], len(chunk), time.monotonic())
            came -= len(chunk)
            found = [(given[engine][index], generation) for index, generation in chunk]
            yield [(key, generation) for (key, _), generation in found]
            growing.subtract(request.group for (_, request), _ in found)
            if queue:
                complete = sum(not growing[group] for group in {request.group for (_, request), _ in found})
                fresh = [one for _ in range(min(complete, len(queue))) for one in queue.popleft()]
                given[engine] += fresh
                occupancy.given(names[engine], len(fresh), time.monotonic())
                more = self._engines.submit(names[engine], [request for _, request in fresh], last=not queue)
                self._calls.gather("eval", more)
        if came and not lost:
            phase = self._calls.phase("eval")
            raise JobError(f"{phase}: the engines returned {asked - came} of {asked} responses")

    def going_on(
        self,
        shares: Sequence[Sequence[tuple[K, GenerationRequest]]],
        sampling: SamplingParams,
        version: int,
        occupancy: Occupancy,
        *,
        more: More[K],
        each: bool = False,
        lost: list[str] | None = None,
    ) -> Iterator[list[tuple[K, Generation]]]:
        """Yield chunks like `responses`, of engines that are asked for more while they generate.

        Args:
            shares, sampling, version, occupancy, lost: as of `responses`.
            more: called again and again; gives what engines are asked for further.
            each: as of `responses`; an engine that has nothing to generate has no deadline.
        """

        def send(name: str, requests: list[GenerationRequest], last: bool) -> list[bool] | None:
            try:
                return self._calls.gather("eval", self._engines.submit(name, requests, last=last))
            except ProcessDiedError as error:
                lose(error)
                return None

        asked = Asked([process.name for process in self._engines], occupancy, shares, more, send)

        def lose(error: ProcessDiedError) -> None:
            if lost is None:
                raise error
            if asked.lost(error.process):
                self.goes_on_without(error)
                lost.append(error.process)

        streams = self._engines.generate(asked.begin(), sampling, version, more=True)
        for engine, chunk in self._calls.stream("eval", streams, each=each, lost=lose, beside=asked.look):
            yield asked.came(engine, chunk)
        if any(asked.left) and not lost:
            phase = self._calls.phase("eval")
            missing = how_many(sum(asked.left), "response")
            raise JobError(f"{phase}: the engines returned {missing} less than they were asked for")

    def take_draft_counts(self) -> DraftCounts | None:
        """The guesses of all engines since the last time; None without speculative decoding."""
        if self._spec.rollout.speculative is None:
            return None
        return sum(self._calls.gather("eval", self._engines.call(Engine.take_draft_counts)), DraftCounts())

    def harvest(self, version: int) -> None:
        """Have the engines end what they generate; `responses` ends with what there is."""
        self._engines.beside(Engine.harvest, version)

    def goes_on_without(self, error: ProcessDiedError) -> None:
        """Leave an engine out that died; raises `error` again where the others do not go on without it."""
        self._engines.on_loss(error)
