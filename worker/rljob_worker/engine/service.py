"""A running generation: requests come in, responses leave, and between two steps it can be held or ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rljob_worker.errors import StopRequested
from rljob_worker.types import Cut, Generation, GenerationRequest

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

    from rljob_worker.engine.generation import StepLoop

OnFinished = Callable[[int, Generation], None]
"""Takes the key of a request and its response."""
OnIdle = Callable[[], None]
"""Called when more requests may come, and when nothing is left to generate before they do."""
Check = Callable[[Sequence[GenerationRequest]], None]
_WAIT_SLICE_SECONDS = 0.2


class RequestService:
    """Generates with one engine. `run` belongs to one thread; everything else may come from any other.

    A response is given back under its request's key; requests without one are numbered in the order in which they
    arrive, from 0 in each run.

    Args:
        loop: of the engine.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._arrived: list[GenerationRequest] = []
        self._keys: list[int] = []
        """Keys of all requests of the running generation, those included that have just arrived."""
        self._check: Check | None = None
        """Check of the running generation; None where none runs that takes more requests."""
        self._active = self._aborted = self._harvesting = self._paused = self._parked = False
        self._failed = False
        self._version = self._harvested = -1
        """Weights of the running generation, and the last ones whose generations were to end early."""
        self.idle_seconds = 0.0
        """In which generations waited for requests with nothing to generate, in all."""

    def run(
        self,
        requests: Sequence[GenerationRequest],
        params: VllmSamplingParams,
        on_finished: OnFinished | None = None,
        *,
        cut: Cut | None = None,
        more: Check | None = None,
        on_idle: OnIdle | None = None,
        version: int = 0,
    ) -> list[Generation]:
        """Generate until all responses are finished, the generation is cut, or somebody harvests it.

        Args:
            requests: to begin with.
            params: for all of them, but for the seed.
            on_finished: called with (key, response) in this thread as each one finishes; at the end with what was
                cut.
            cut: when to end before all are finished; it is looked at after each step, so that where it falls depends
                on the requests alone. Their `group` says what belongs together.
            more: further requests may be submitted until `close`; called with them, raises ValueError for a wrong one.
                Whether a group is complete is unknown then: without `cut`.
            on_idle: called in this thread when requests may be submitted, and before it waits for them with nothing
                left to generate.
            version: of the engine's weights.

        Returns:
            The responses in the order of arrival; those that were cut have an empty finish reason.

        Raises:
            ValueError: two requests have one key, or `cut` comes with `more`.
            StopRequested: `abort` was called; the engine is idle again.
            JobError: vLLM gave a request up, or a log-probability is not finite.
        """
        if cut is not None and more is not None:
            raise ValueError(
                "engine: a generation that takes more requests cannot be cut: a group is complete when no request of "
                "it comes any more, which nothing says; harvest it instead"
            )
        done: dict[int, Generation] = {}

        def give(index: int, generation: Generation) -> None:
            done[index] = generation
            if on_finished is not None:
                on_finished(self._keys[index], generation)

        groups: list[int] = []
        with self._running(requests, more, version):
            if more is not None and on_idle is not None:
                on_idle()
            self._add(requests, groups, params)
            while self._heed(groups, params, on_idle):
                finished = self._loop.step()
                for index, generation in finished:
                    give(index, generation)
                if finished and cut is not None and _is_cut(cut, groups, done):
                    break
            if len(self._loop):
                for index, generation in self._loop.take_back():
                    give(index, generation)
        return [done[index] for index in range(len(groups))]

    # --- from other threads -------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> bool:
        """Add requests to the running generation.

        Returns:
            False where somebody harvested it or it failed, so that it takes none any more.

        Raises:
            ValueError: one of them cannot be generated, or has the key of another request.
            RuntimeError: no generation runs that takes more.
        """
        with self._changed:
            if self._check is None:
                if self._harvesting or self._failed or 0 <= self._version <= self._harvested:
                    return False
                raise RuntimeError("engine: no generation runs that takes more requests")
            self._check(requests)
            self._keys += _new_keys(self._keys, requests)
            self._arrived += requests
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """No more requests will come: the generation ends with those that it has."""
        with self._changed:
            self._check = None
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Hold the generation between two steps, its KV cache dropped; what was sampled stays.

        It is held until `resume`, `harvest` or `abort`.

        Raises:
            TimeoutError: the engine's step did not end within so many seconds; the generation is not held.
            RuntimeError: no generation runs, or it ended meanwhile.
        """
        with self._changed:
            self._must_run()
            self._paused = True
            if not self._changed.wait_for(lambda: self._parked or not self._active, seconds):
                self._paused = False
                raise TimeoutError(f"engine: its step did not end within {seconds:g} s")
            self._must_run()

    def resume(self) -> None:
        """Go on after `pause`, to the bits that would have come without it."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def harvest(self) -> None:
        """End the running generation at its next step; what it has of each response is returned.

        Raises:
            RuntimeError: no generation runs.
        """
        with self._changed:
            self._must_run()
            self._harvesting = True
            self._changed.notify_all()

    def harvest_version(self, version: int) -> None:
        """Same as `harvest`, for generations with these weights or earlier ones: one that runs, and any that begins
        yet."""
        with self._changed:
            self._harvested = version
            self._changed.notify_all()

    def abort(self) -> None:
        """End the running generation at its next step with StopRequested, or the next one when none runs."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    # --- inside -------------------------------------------------------------------------------

    @contextmanager
    def _running(self, requests: Sequence[GenerationRequest], more: Check | None, version: int) -> Iterator[None]:
        keys = _new_keys([], requests)
        with self._changed:
            self._keys = keys
            self._active, self._check, self._arrived, self._harvesting = True, more, [], False
            self._failed = False
            self._version = version
        try:
            yield
        except BaseException:
            self._loop.give_up()
            self._failed = True
            raise
        finally:
            with self._changed:
                self._check = None
                self._active = self._aborted = self._paused = self._parked = False
                self._changed.notify_all()

    def _must_run(self) -> None:
        if not self._active:
            raise RuntimeError("engine: no generation runs")

    def _heed(self, groups: list[int], params: VllmSamplingParams, on_idle: OnIdle | None) -> bool:
        """Do what was asked since the step before; whether there is another one to make."""
        with self._changed:
            if self._paused:
                self._loop.interrupt()
                self._parked = True
                self._changed.notify_all()
            if on_idle is not None and self._is_idle():
                on_idle()
            while (self._paused or self._is_idle()) and not self._aborted and not self._is_harvested():
                began, idle = time.perf_counter(), not self._paused
                self._changed.wait(_WAIT_SLICE_SECONDS)
                self.idle_seconds += (time.perf_counter() - began) * idle
            self._parked = False
            if self._aborted:
                raise StopRequested("generation was ended before all responses were finished")
            arrived, self._arrived = self._arrived, []
            harvesting = self._is_harvested()
            if harvesting:
                # What is submitted from here on would never be looked at.
                self._check = None
        self._add(arrived, groups, params)
        return bool(len(self._loop)) and not harvesting

    def _is_harvested(self) -> bool:
        return self._harvesting or self._version <= self._harvested

    def _is_idle(self) -> bool:
        """Whether there is nothing to do but to wait for requests."""
        return not len(self._loop) and not self._arrived and self._check is not None

    def _add(self, requests: Sequence[GenerationRequest], groups: list[int], params: VllmSamplingParams) -> None:
        self._loop.add(len(groups), requests, params)
        groups += [request.group for request in requests]


def _new_keys(keys: list[int], requests: Sequence[GenerationRequest]) -> list[int]:
    """The keys of requests that come after those with `keys`; ValueError where one is there already."""
    taken, new = set(keys), []
    for place, request in enumerate(requests, len(keys)):
        key = place if request.key is None else request.key
        if key in taken:
            raise ValueError(f"engine: two requests have the key {key}: their responses could not be told apart")
        taken.add(key)
        new.append(key)
    return new


def _is_cut(cut: Cut, groups: list[int], done: dict[int, Generation]) -> bool:
    missing = Counter(groups)
    missing.subtract(groups[index] for index in done)
    complete = {group for group, count in missing.items() if not count}
    return all(len(quota.among & complete) >= quota.least for quota in cut.quotas)
