"""Scoring processes for one reward: started, given work, and killed past a deadline, by one thread."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from rljob_worker.confined.loading import whole_characters
from rljob_worker.confined.process import ConfinedProcess, Place
from rljob_worker.rewards.functions import RewardFailure, Sample, Score, received_scores
from rljob_worker.rewards.process import late_message, scoring_process
from rljob_worker.rewards.worker import Setup, timeout_message

ASYNC_GRACE_SECONDS = 2.0
"""Seconds past its deadline that an async reward may take to answer: the process times it out itself, unless
blocked."""

Done = Callable[[list[Score] | RewardFailure], None]


@dataclass(slots=True)
class _Task:
    number: int
    samples: list[Sample]
    done: Done


@dataclass(slots=True, eq=False)
class _Process:
    of: ConfinedProcess
    start_deadline: float
    ready: bool = False
    running: dict[int, tuple[_Task, float]] = field(default_factory=dict)
    """By task number: the task and its deadline."""


class WorkerPool:
    """Runs tasks in up to `processes` processes, `in_flight` at once in each, each within `setup.timeout_seconds`.

    `done` is called from the pool's thread with the scores or with an error text. A process that does not answer in
    time is killed and replaced, and what else it was running runs again.
    """

    def __init__(self, setup: Setup, *, processes: int, in_flight: int, grace: float, place: Place):
        self._setup, self._processes_limit, self._in_flight = setup, processes, in_flight
        self._allowed_seconds = setup.timeout_seconds + grace
        self._place = place
        self._processes: list[_Process] = []
        self._queue: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._broken: str | None = None
        self._count = 0
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)

    def start(self) -> None:
        """Start the processes. Idempotent."""
        if not self._thread.is_alive() and not self._closing:
            self._thread.start()

    def submit(self, samples: list[Sample], done: Done) -> None:
        """Queue one task: one sample, or a batch."""
        self.start()
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            if self._broken is None:
                self._count += 1
                self._queue.append(_Task(self._count, samples, done))
                self._wake()
                return
        done(RewardFailure(self._broken))

    def cancel_queued(self) -> int:
        """Forget the tasks that have not been started; returns how many. Their `done` is never called."""
        with self._lock:
            cancelled = len(self._queue)
            self._queue.clear()
            return cancelled

    def close(self) -> None:
        """Kill the processes; tasks that have not ended never will."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._queue.clear()
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout=10)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        # The socket holds some 278 bytes that were not read, and is full only where the thread is woken anyway: whoever
        # waited here would have the lock that the thread waits for before it reads.
        with contextlib.suppress(BlockingIOError):
            self._wake_writer.send(b"x")

    def _run(self) -> None:
        try:
            while len(self._processes) < self._processes_limit:
                self._spawn()
            while not self._closing:
                self._assign()
                self._receive()
                self._expire()
        except Exception as error:
            # A thread's exception would pass unseen, and `take_all` would wait for its deadline.
            with self._lock:
                self._broken = f"scoring stopped: {type(error).__name__}: {error}"
            self._fail_queued(self._broken)
            for task in [task for process in self._processes for task, _ in process.running.values()]:
                task.done(RewardFailure(self._broken))
        finally:
            for process in self._processes:
                process.of.kill()

    def _spawn(self) -> None:
        deadline = time.monotonic() + self._setup.import_seconds
        self._processes.append(_Process(scoring_process(self._setup, self._place), deadline))

    def _assign(self) -> None:
        for process in list(self._processes):
            while process.ready and len(process.running) < self._in_flight:
                with self._lock:
                    if not self._queue:
                        return
                    task = self._queue.popleft()
                self._give(process, task)
                if process not in self._processes:
                    break
        if self._queue and not self._processes:
            self._spawn()

    def _give(self, process: _Process, task: _Task) -> None:
        try:
            message = pickle.dumps((task.number, task.samples))
        except Exception as error:
            what = f"the sample cannot be sent to the scoring process: {type(error).__name__}: {error}"
            task.done(RewardFailure(what))
            return
        process.running[task.number] = task, time.monotonic() + self._allowed_seconds
        try:
            process.of.connection.send_bytes(message)
        except OSError:
            self._died(process)

    def _receive(self) -> None:
        deadlines = [deadline for process in self._processes for _, deadline in process.running.values()]
        deadlines += [process.start_deadline for process in self._processes if not process.ready]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        by_connection = {process.of.connection: process for process in self._processes}
        for source in wait([*by_connection, self._wake_reader], timeout):
            if isinstance(source, Connection):
                self._read(by_connection[source])
            else:
                self._wake_reader.recv(4096)

    def _read(self, process: _Process) -> None:
        try:
            message = process.of.read()
            if process.ready:
                self._take(process, message)
                return
            kind, value = message
        except (EOFError, ValueError, KeyError):
            self._died(process)
            return
        if kind == "ready":
            process.ready = True
        else:
            self._cannot_start(
                process, f"the reward does not load in a scoring process:\n{whole_characters(str(value))}"
            )

    def _take(self, process: _Process, message: list[Any]) -> None:
        """An answer to a task; ValueError or KeyError when it is none."""
        number, kind, value = message
        if not isinstance(number, int):
            raise ValueError(f"task {number!r}")
        task, _ = process.running[number]
        scores = received_scores(value, len(task.samples)) if kind == "scores" else None
        del process.running[number]
        task.done(RewardFailure(whole_characters(str(value)), kind == "outage") if scores is None else scores)

    def _expire(self) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            expired = [task for task, deadline in process.running.values() if deadline <= now]
            if expired:
                for task in expired:
                    del process.running[task.number]
                    task.done(RewardFailure(timeout_message(self._setup.timeout_seconds)))
                self._retire(process, rerun=True)
            elif not process.ready and process.start_deadline <= now:
                self._cannot_start(process, f"a scoring process did not start: {late_message(self._setup)}")

    def _died(self, process: _Process) -> None:
        running = [task for task, _ in process.running.values()]
        ready = process.ready
        error = process.of.end()
        self._retire(process, rerun=False)
        if ready:
            self._spawn()
        for task in running:
            task.done(RewardFailure(error))
        if not ready:
            self._fail_queued(error)

    def _cannot_start(self, process: _Process, error: str) -> None:
        self._retire(process, rerun=False)
        self._fail_queued(error)

    def _fail_queued(self, error: str) -> None:
        with self._lock:
            tasks = list(self._queue)
            self._queue.clear()
        for task in tasks:
            task.done(RewardFailure(error))

    def _retire(self, process: _Process, *, rerun: bool) -> None:
        self._processes.remove(process)
        process.of.kill()
        if rerun:
            with self._lock:
                self._queue.extendleft(task for task, _ in reversed(process.running.values()))
            self._spawn()
