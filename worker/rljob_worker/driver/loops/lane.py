"""The engines' lane: what they do beside the trainers, one piece of work at a time, in a thread of its own."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

from rljob_api.phases import ENGINE_LANE
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.engine.engine import Engine
from rljob_worker.errors import StopRequested
from rljob_worker.phases import PhaseClock
from rljob_worker.rollouts.step import Step
from rljob_worker.trainer.trainer import Trainer

_SLICE_SECONDS = 0.05
_LEAVE_SECONDS = 5.0
"""Seconds that work may take to end once it was given up; the processes are ended next, when the lane is closed."""
_SHARE_OF_GRACE = 0.5
"""Share of `checkpoint.graceSeconds` for which the engines' lane is waited for after a stop request. The rest is for
the checkpoint."""


class EngineLane:
    """Runs work of the engines while the calling thread trains.

    Each piece of work has its waits with their own deadlines. Whatever it raises is raised in the calling thread: where
    that waits for the lane, and by `check` where it waits for trainers. Between the end of a piece and `release` the
    engines are in phase `admission_wait`.

    Args:
        clock: the lane's; the work enters its phases.
        stop: set when the job was asked to stop.
        given_up: set by this object: work under way is to end with StopRequested.
    """

    def __init__(self, clock: PhaseClock, stop: threading.Event, given_up: threading.Event) -> None:
        self.clock = clock
        self._stop, self._given_up = stop, given_up
        self._thread: threading.Thread | None = None
        self._done, self._released = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    @property
    def working(self) -> bool:
        """Whether a piece of work is under way."""
        return self._thread is not None and not self._done.is_set()

    def begin(self, work: Callable[[], None]) -> None:
        """Start a piece of work; the one before must be done."""
        self.release()
        self._done, self._released, self._error = threading.Event(), threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(work,), name="engine-lane", daemon=True)
        self._thread.start()

    def idle(self) -> None:
        """The engines have nothing to do until `release`."""
        if self._thread is None:
            self.begin(lambda: None)

    def finish(self, patience: float = 0.0) -> None:
        """Wait until the work is done.

        Args:
            patience: seconds that it may go on for after a stop request.

        Raises:
            StopRequested: a stop request ended it before it was done.
        """
        given_up_at = None
        while not self._done.wait(_SLICE_SECONDS):
            if self._stop.is_set():
                given_up_at = given_up_at or time.monotonic() + patience
                if time.monotonic() >= given_up_at:
                    self._given_up.set()
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Raise what the work raised, if it has by now."""
        if self._error is not None and not isinstance(self._error, StopRequested):
            raise self._error

    def release(self) -> None:
        """The engines need not wait any longer: what comes next is theirs too. The work is done."""
        if self._thread is not None:
            assert self._done.is_set(), "released at work"
            self._released.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Give up what is under way, and wait a moment for its end; nothing is raised."""
        self._given_up.set()
        self._released.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)
        self._thread, self._error = None, None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
        self._done.set()
        with self.clock.phase("admission_wait"):
            # Released by whoever waits for the work, or closes the lane.
            self._released.wait()


class LanedLoop(Job[Handover]):
    """A loop whose trainers and engines have devices of their own, and a lane of phases each."""

    def __init__(self, given: Surroundings) -> None:
        spec, cluster, given_up = given.spec, given.cluster, threading.Event()
        clock = given.clock.lane(ENGINE_LANE, lambda name, gap: given.events.phase(name, gap, lane=ENGINE_LANE))
        self.lane = EngineLane(clock, given.stop, given_up)
        engines = given.calls.beside(given_up, lambda: cluster.engines.beside(Engine.abort))
        trainers = given.calls.beside(
            given.stop, lambda: cluster.trainers.beside(Trainer.request_stop), self.lane.check
        )
        engine_calls = PhaseCalls(engines, clock, spec.timeouts)
        super().__init__(replace(given, calls=trainers), Handover, engine_calls, given_up)

    def train(self) -> None:
        """Run steps until the job is done; StopRequested when it was asked to stop before."""
        try:
            if self.due_initial_evaluation():
                self.evaluate_at_start()
            self.complete_restored_step()
            self.clock.restart()
            self.train_steps()
        finally:
            self.lane.close()

    @abstractmethod
    def train_steps(self) -> None:
        """Run steps until the job is done; StopRequested when it was asked to stop before one."""

    def begin_generation(self, step: Step, score: Callable[[], None]) -> None:
        """Have the engines' lane generate for a step, and wait for rewards."""

        def make() -> None:
            with self.lane.clock.phase("rollout"):
                self.rollouts.generate(step)
            with self.lane.clock.phase("reward_wait"):
                score()

        self.lane.begin(make)

    def hand_over(self) -> None:
        """Give the engines, which stand still, the weights of the step; evaluate where it is due."""
        self.lane.release()
        with self.clock.phase("update_weights"), self.lane.clock.phase("update_weights"):
            self.handover.update_weights()
            if self.handover.due_probe():
                self.handover.probe_weights()
        if self.due_evaluation():
            with self.clock.phase("batch_wait"):
                self.evaluate()

    @property
    def _patience(self) -> float:
        """Seconds that the engines' lane may go on for after a stop request."""
        return _SHARE_OF_GRACE * self.spec.checkpoint.grace_seconds

    def _held_out(self) -> dict[str, float]:
        found: dict[str, float] = {}

        def evaluate() -> None:
            with self.lane.clock.phase("eval"):
                found.update(self.rollouts.evaluate())

        self._in_lane(evaluate)
        return found

    def _in_lane(self, work: Callable[[], None]) -> None:
        """Have the engines' lane do this, and wait for it."""
        self.lane.begin(work)
        self.lane.finish()
        self.lane.release()
