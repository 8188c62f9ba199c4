"""Waiting for actor calls: every wait has a deadline, sees a dead process at once and obeys a stop request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
import ray.exceptions

from rljob_worker.cluster.actor import Reply
from rljob_worker.cluster.out_of_memory import in_short
from rljob_worker.cluster.ray_watch import RayWatch
from rljob_worker.errors import (
    JobError,
    PhaseDeadlineError,
    ProcessDiedError,
    RayLostError,
    StopRequested,
    UserError,
)
from rljob_worker.records.rank_times import RankTimes

logger = logging.getLogger(__name__)
A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T", covariant=True)
_SLICE_SECONDS = 0.2
_BESIDE_SECONDS = 0.005
_PAUSE_SECONDS = 2.0
"""A wait that returns so much late was not waiting: nobody else is to blame for that time."""
_DEATH_SECONDS = 5.0
"""Seconds by which the death of a process may become known later than its peers' errors."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One running actor call, which replies with a T, and the process that runs it."""

    process: str
    ref: Any
    sent: float = 0.0
    """Unix seconds, before the process could begin with it."""


class Calls:
    """Gathers results of actor calls for the driver.

    Args:
        stop: set when the job was asked to stop.
        interrupt: called once when a stop arrives during a stoppable call; makes the call end early.
        death_of: says of a process that it died, where, and its last log lines.
        on_deadline: called with the name of the overdue work before the deadline error is raised.
        watch: called while waiting; raises what shall end the wait.
        ray_watch: says while waiting that Ray itself is gone.
    """

    def __init__(
        self,
        stop: threading.Event,
        interrupt: Callable[[], object],
        death_of: Callable[[str], str],
        on_deadline: Callable[[str], None],
        *,
        watch: Callable[[], None] = lambda: None,
        ray_watch: RayWatch | None = None,
    ) -> None:
        self._stop = stop
        self._interrupt = interrupt
        self._interrupted = False
        self._death_of = death_of
        self._on_deadline = on_deadline
        self._watch = watch
        self._ray_watch = ray_watch or RayWatch(lambda lost: None)
        self._paused = 0.0
        self.busy: dict[str, float] = {}
        self.times = RankTimes()
        """When each process was at work, since they were last taken."""

    def beside(
        self, stop: threading.Event, interrupt: Callable[[], object], watch: Callable[[], None] = lambda: None
    ) -> Calls:
        """Waits of another thread for some of the same processes, with a stop and an interrupt of their own.

        One object is for one thread; `busy` and `times` are what all of them saw.
        """
        calls = Calls(stop, interrupt, self._death_of, self._on_deadline, watch=watch, ray_watch=self._ray_watch)
        calls.busy, calls.times = self.busy, self.times
        return calls

    def gather(
        self, what: str, calls: Sequence[Call[A]], seconds: float, *, stoppable: bool = False, until_stop: bool = False
    ) -> list[A]:
        """Results in the order of `calls`.

        A stop request does not leave a stoppable call behind: it interrupts it and waits for how it ends, since only
        the processes know whether the weights were already changed. One that has nothing to lose runs `until_stop`.

        Raises:
            PhaseDeadlineError: not all done after `seconds`.
            ProcessDiedError: a process ended.
            RayLostError: a process of Ray's own did.
            StopRequested: the call was interrupted by a stop request, or left behind.
            JobError: the call itself failed.
            UserError: the process refused what the user wrote.
        """
        by_ref = {call.ref: call for call in calls}
        results: dict[Any, Any] = {}
        stopped: StopRequested | None = None
        for ref in self._finished(what, by_ref, seconds, stoppable, until_stop=until_stop):
            try:
                results[ref] = self._value(what, by_ref[ref], ref)
            except StopRequested as error:
                stopped = error
            except (ProcessDiedError, RayLostError):
                raise
            except JobError:
                self._raise_for_the_dead(what, [c for c in calls if c.ref is not ref and c.ref not in results])
                raise
        if stopped is not None:
            raise stopped
        return [results[call.ref] for call in calls]

    def gather_both(
        self,
        what: str,
        first: Sequence[Call[A]],
        second: Sequence[Call[B]],
        seconds: float,
        *,
        until_stop: bool = False,
    ) -> tuple[list[A], list[B]]:
        """Same as `gather`, for two sides that depend on each other and are waited for together."""
        both: list[Any] = self.gather(what, [*first, *second], seconds, until_stop=until_stop)
        return both[: len(first)], both[len(first) :]

    def _raise_for_the_dead(self, what: str, calls: Sequence[Call[Any]]) -> None:
        """ProcessDiedError when one of these processes died: its peers' errors are only what follows from that."""
        by_ref = {call.ref: call for call in calls}
        pending = list(by_ref)
        deadline = time.monotonic() + _DEATH_SECONDS
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            for ref in done:
                try:
                    self._value(what, by_ref[ref], ref)
                except (ProcessDiedError, RayLostError):
                    raise
                except (JobError, StopRequested, UserError):
                    continue

    def stream(
        self,
        what: str,
        calls: Sequence[Call[A]],
        seconds: float,
        *,
        each: bool = False,
        lost: Callable[[ProcessDiedError], None] | None = None,
        beside: Callable[[], Collection[int]] | None = None,
    ) -> Iterator[tuple[int, A]]:
        """Items of streaming calls as (position of the call in `calls`, item), in order of arrival; errors as above.

        A stop request interrupts the calls and ends the stream with StopRequested. With `each`, a call has `seconds`
        for each of its items, and not for all of them. With `lost`, the stream of a process that died ends with a call
        of it, and the others go on. `beside` is called again and again while items are waited for; it gives positions
        of calls from which nothing is awaited, whose deadlines begin anew.
        """
        positions = {call.ref: index for index, call in enumerate(calls)}
        by_ref = {call.ref: call for call in calls}
        deadlines = dict.fromkeys(by_ref, self._now() + seconds)

        def look() -> None:
            for position in () if beside is None else beside():
                deadlines[calls[position].ref] = self._now() + seconds

        with self.times.streaming(positions):
            yield from self._items(
                what, by_ref, positions, seconds, deadlines, each, lost, None if beside is None else look
            )

    def _items(
        self,
        what: str,
        by_ref: dict[Any, Call[A]],
        positions: Mapping[Any, int],
        seconds: float,
        deadlines: dict[Any, float],
        each: bool,
        lost: Callable[[ProcessDiedError], None] | None,
        beside: Callable[[], None] | None,
    ) -> Iterator[tuple[int, A]]:
        """Results of `stream`; the calls that ended leave `by_ref`."""
        while by_ref:
            for stream in self._finished(what, by_ref, seconds, True, deadlines=deadlines, beside=beside):
                if each:
                    deadlines[stream] = self._now() + seconds
                try:
                    item = next(stream)
                except StopIteration:
                    del by_ref[stream]
                    continue
                try:
                    value = self._value(what, by_ref[stream], item)
                except ProcessDiedError as error:
                    if lost is None:
                        raise
                    del by_ref[stream]
                    lost(error)
                    continue
                if self._stop.is_set():
                    raise StopRequested
                yield positions[stream], value

    def _finished(
        self,
        what: str,
        by_ref: dict[Any, Call[Any]],
        seconds: float,
        stoppable: bool,
        *,
        deadlines: dict[Any, float] | None = None,
        until_stop: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Iterator[Any]:
        """References as they become ready: all of them, or with deadlines that began before those ready first."""
        first_only = deadlines is not None
        deadlines = dict.fromkeys(by_ref, self._now() + seconds) if deadlines is None else deadlines
        pending = list(by_ref)
        while pending:
            self._watch()
            self._check_ray(what)
            if until_stop and self._stop.is_set():
                raise StopRequested
            if stoppable and self._stop.is_set() and not self._interrupted:
                self._interrupted = True
                self._interrupt()
            if beside is not None:
                beside()
            left = min(deadlines[ref] for ref in pending) - self._now()
            if left <= 0:
                self._on_deadline(what)
                now = self._now()
                late = ", ".join(by_ref[ref].process for ref in pending if deadlines[ref] <= now)
                raise PhaseDeadlineError(f"{what}: {late} not finished after {seconds:g} s (spec.timeouts)")
            slice_seconds = _SLICE_SECONDS if beside is None else _BESIDE_SECONDS
            patience, began = min(left, slice_seconds), time.monotonic()
            done, pending = ray.wait(pending, num_returns=1, timeout=patience)
            self._note_pause(time.monotonic() - began - patience)
            yield from done
            if done and first_only:
                return

    def _check_ray(self, what: str, *, now: bool = False) -> None:
        """With Ray's own processes end the others: those are what is to be named."""
        try:
            self._ray_watch.check_now() if now else self._ray_watch.check()
        except RayLostError as error:
            raise RayLostError(f"{what}: {error}") from None

    def _now(self) -> float:
        """A clock that stands while this process does not run."""
        return time.monotonic() - self._paused

    def _note_pause(self, seconds: float) -> None:
        if seconds > _PAUSE_SECONDS:
            self._paused += seconds
            logger.warning("the driver did not run for %.0f s (SIGSTOP, or a paused machine); deadlines wait", seconds)

    def _value(self, what: str, call: Call[Any], ref: Any) -> Any:
        process = call.process
        try:
            reply: Reply[Any] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, JobError | StopRequested | UserError):
                raise cause from error
            raise JobError(f"{what}: {process}: {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            self._check_ray(what, now=True)
            raise ProcessDiedError(f"{what}: {self._death_of(process)}", process) from error
        except ray.exceptions.OutOfMemoryError as error:
            reason = in_short(str(error))
            said = f"{what}: {self._death_of(process)}\nOutOfMemoryError: {reason}"
            raise ProcessDiedError(said, process) from error
        except ray.exceptions.RayError as error:
            self._check_ray(what, now=True)
            # A lost placement group, a runtime_env that cannot be made: only Ray knows why.
            said = f"{what}: {self._death_of(process)}\n{type(error).__name__}: {error}"
            raise ProcessDiedError(said, process) from error
        self.busy[process] = reply.busy_seconds
        if reply.began:
            self.times.note(process, what, call.ref, (call.sent, time.time()), (reply.began, reply.ended))
        return reply.value
