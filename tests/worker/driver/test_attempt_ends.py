"""However an attempt ends, short of a kill, `events.jsonl` says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import events, manifest

from rljob_api import RLJob
from rljob_api.validation import load_manifest
from rljob_api.wire.run_status import RunOutcome
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.cli.main import main
from rljob_worker.cluster.ray_session import RaySession
from rljob_worker.driver import attempt, run
from rljob_worker.driver.stop import stopping_at_once
from rljob_worker.errors import AwayError, JobError, StoppedEarly, StopRequested, UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.steps import StepLog


class Surroundings:
    """An attempt without Ray, model and data, whose training ends by an error."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException, ray: Callable[..., Any] | None = None
    ) -> None:
        self.path, self.killed = folder / "run", list[float]()
        job = load_manifest(manifest(folder).read_text())
        run_folder = RunFolder(self.path, job, False)
        failures = WriteFailures()

        def train() -> None:
            raise ends

        def create(calls: object, updates: int, stop: threading.Event, *_: object) -> None:
            if stop.is_set():
                raise StopRequested

        loop: Any = SimpleNamespace(
            train=train, spec=job.spec, start=lambda: 0, goal=lambda: "", stopped=lambda: "nothing new", ready=False
        )
        self.attempt = self._attempt(job, run_folder, StepLog(self.path, failures), failures, loop)
        cluster = SimpleNamespace(
            kill=lambda seconds=0.0, **_: self.killed.append(seconds),
            interrupt=lambda: None,
            death_of=str,
            create=create,
            start=lambda calls: None,
        )
        monkeypatch.setattr(attempt, "Cluster", lambda *_, **__: cluster)
        monkeypatch.setattr(attempt, "embedded", ray or self.ray)
        monkeypatch.setattr(attempt, "_serve", lambda *_: None)
        monkeypatch.setattr(attempt.Attempt, "_surroundings", lambda *_: None)

    @staticmethod
    def _attempt(job: RLJob, folder: RunFolder, log: StepLog, failures: WriteFailures, loop: Any) -> attempt.Attempt:
        nothing = SimpleNamespace(start=lambda *_: None, close=lambda: None)
        inputs: Any = SimpleNamespace(
            rewards=nothing, group_filter=None, hosts=[], labels=nothing, judge=None,
            model_folder=folder.path, critic_folder=None, teacher_folder=None,
        )  # fmt: skip
        silent = lambda _: None  # noqa: E731
        return attempt.Attempt(job, folder, inputs, log, failures, silent, silent, lambda _: loop, False, None)

    @contextmanager
    def ray(self, *_: Any) -> Iterator[RaySession]:
        yield RaySession()

    def last(self) -> tuple[str, str]:
        last = events(self.path)[-1]
        return last["event"], last.get("message", last.get("outcome"))


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _asked_twice(*_: object, **__: object) -> None:
    """Be asked to stop, and once more while what was begun is undone."""
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
    pytest.fail("it goes on")


def _raising(error: Exception, *_: object, **__: object) -> None:
    raise error


def test_an_error_that_nobody_foresaw_is_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    around = Surroundings(tmp_path, monkeypatch, ValueError("environments: there is no episode 84"))
    outcome = around.attempt.run()
    said = "ValueError: environments: there is no episode 84 (an error of the driver itself; its log has the traceback)"
    assert (outcome.exit_code, outcome.outcome, outcome.message) == (1, RunOutcome.FAILED, said)
    assert around.last() == ("failed", said)
    assert around.killed == [attempt.LEAVE_SECONDS], "its processes are ended before Ray is"
    assert "in train" in caplog.text


def test_what_ends_the_process_is_an_event_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings(tmp_path, monkeypatch, SystemExit(15))
    with pytest.raises(SystemExit):
        around.attempt.run()
    assert around.last() == ("failed", "SystemExit: 15")


def test_a_ray_that_does_not_start_is_an_event_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ray(*_: Any) -> Any:
        raise JobError("start: Ray does not start on this machine")

    around = Surroundings(tmp_path, monkeypatch, AssertionError(), no_ray)
    with pytest.raises(JobError):
        around.attempt.run()
    assert around.last() == ("failed", "JobError: start: Ray does not start on this machine")


def test_a_stop_while_ray_starts_is_obeyed_once_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def ray(*_: Any) -> Iterator[RaySession]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield RaySession()

    around = Surroundings(tmp_path, monkeypatch, AssertionError("it trains"), ray)
    outcome = around.attempt.run()
    assert (outcome.exit_code, outcome.message) == (75, "stopped as asked; nothing new")
    assert around.last() == ("end", "Stopped")


def test_a_stop_while_inputs_are_read_leaves_nothing_of_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "read_inputs", _asked_twice)
    before = signal.getsignal(signal.SIGTERM)
    code = main(["run", str(manifest(tmp_path)), "--output", str(tmp_path / "run")])
    assert (code, (tmp_path / "run").exists()) == (75, False)
    assert capsys.readouterr().err.endswith("rljob: stopped as asked, before anything was started\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("read", "code", "event", "told"),
    [
        (lambda *_, **__: _asked_twice(), 75, "end", RunOutcome.STOPPED),
        (lambda *_, **__: signal.raise_signal(signal.SIGINT), 130, "failed", "KeyboardInterrupt: "),
        (partial(_raising, AwayError("judge: no answer")), 1, "failed", "JobError: judge: no answer"),
        (partial(_raising, UserError("data: no row")), 2, "failed", "UserError: data: no row"),
    ],
)
def test_an_end_while_inputs_are_read_is_an_event_of_a_run_that_is_continued(
    read: Callable[..., Any], code: int, event: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifest(tmp_path)
    RunFolder(tmp_path / "run", load_manifest(path.read_text()), False).close()
    monkeypatch.setattr(run, "read_inputs", read)
    assert main(["run", str(path), "--output", str(tmp_path / "run"), "--resume"]) == code
    (last,) = events(tmp_path / "run")
    assert (last["attempt"], last["event"], last.get("message", last.get("outcome"))) == (2, event, told)
    assert (tmp_path / "run" / "run.json").exists()


def test_a_stop_before_ray_is_started_is_an_event_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings(tmp_path, monkeypatch, AssertionError("it trains"))
    monkeypatch.setattr(attempt, "Records", _asked_twice)
    with stopping_at_once(), pytest.raises(StoppedEarly):
        around.attempt.run()
    assert around.last() == ("end", "Stopped")


def test_the_last_word_waits_for_no_disk() -> None:
    """The end of a process that hangs must not hang with it."""
    there, never = list[str](), threading.Event()

    def write(event: str, message: str) -> None:
        there.append(message)
        never.wait()

    log: Any = SimpleNamespace(write=write)
    attempt._last_word(log, "Ray is gone")
    never.set()
    assert there == ["Ray is gone"]
