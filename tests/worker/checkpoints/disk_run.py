"""A run of the driver without Ray, Megatron and vLLM, on a disk that fails: `disk_run.py FOLDER SEED CASES`.

Everything that writes is the real thing, in the order of the loop; trainers are this process, and their weights a few
numbers. CASES of all (call, errno, once or for good, whole or half, what was there before) are drawn by the seed; 0:
all of them. Then each kind of file that a run goes on without, on a disk that never takes it. Prints one line of JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.disk_faults import CHANGES, Fault, Injector
from test_run_folder import job

from rljob_api import RLJob
from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.run_status import RunOutcome
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.recovery import Recovery
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.driver.outcome import Outcome, conclude, failed, with_all_records
from rljob_worker.errors import JobError, UserError
from rljob_worker.flow.pool import PoolState
from rljob_worker.host.files import WriteFailures
from rljob_worker.models.hf_io import save_hf_folder
from rljob_worker.phases import PhaseClock
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.events import EVENTS, EventLog
from rljob_worker.records.steps import StepLog, effective_steps, read_steps
from rljob_worker.records.tensorboard import TensorBoardSink
from rljob_worker.records.trajectories import write_trajectories
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rollouts.step import Progress
from rljob_worker.trainer.checked_file import CheckedFile, damage
from rljob_worker.trainer.state_file import path_of, write_state

RANKS = 2
STEPS = 6
ERRNOS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EDQUOT, errno.ENOLCK, errno.ENOENT)
BIG = 20_000
"""Bytes of a sample and of a record: a write of them can be cut in half."""


class Trainers:
    """Two ranks in this process."""

    def __len__(self) -> int:
        return RANKS

    def call(self, method: Callable[..., Any], *args: Any) -> list[Callable[[], Any]]:
        """Each rank's call, as `cluster.groups.Group` starts it."""
        answers: list[Callable[[], Any]] = getattr(self, method.__name__)(*args)
        return answers

    def save(self, folder: str) -> list[Callable[[], Any]]:
        return [lambda rank=rank: self._save(folder, rank) for rank in range(RANKS)]

    def _save(self, folder: str, rank: int) -> list[CheckedFile]:
        return [write_state(path_of(folder, rank), {"weight": torch.full((64,), float(rank))}, {"rank": rank})]

    def damage(self, folder: str, files: tuple[CheckedFile, ...]) -> list[Callable[[], str]]:
        return [lambda file=file: damage(folder, file) for file in files]

    def load(self, folder: str) -> list[Callable[[], str]]:
        """Nothing is resharded."""
        return [lambda: ""] * RANKS


class Calls:
    """Waits for calls as `cluster.calls` does: what a process raises comes as JobError."""

    calls: Any

    def __init__(self) -> None:
        self.calls = self

    def deadline(self, phase: str) -> float:
        return 60.0

    def gather(self, what: str, calls: list[Callable[[], Any]], seconds: float, **_: Any) -> list[Any]:
        try:
            return [call() for call in calls]
        except (JobError, UserError):
            raise
        except Exception as error:
            raise JobError(f"{what}: trainer: {type(error).__name__}: {error}") from error


@dataclass
class Operator:
    """Reads the step records over HTTP, and counts each once."""

    counted: list[dict[str, Any]] = field(default_factory=list)

    def look(self, log: StepLog) -> None:
        self.counted += [json.loads(line) for line in log.after(len(self.counted) - 1)]


@dataclass
class Seen:
    """Facts about a run from outside the disk."""

    operator: Operator = field(default_factory=Operator)
    saved: list[int] = field(default_factory=list)
    reached: int = 0
    failures: list[dict[str, int]] = field(default_factory=list)
    """Failures of each attempt."""


def attempt(folder: Path, work: RLJob, seen: Seen) -> Outcome:
    """One start of the driver, in the order of `run_job` and the loop; every error ends as the command line ends it."""
    failures = WriteFailures()
    prompts = SimpleNamespace(skipped=dict, restore=lambda *_, **__: None, saved=PoolState({}), mended=())
    try:
        with ExitStack() as stack:
            run = RunFolder(folder, work, resume="auto")
            stack.callback(run.close)
            log = StepLog(run.path, failures, run.check)
            stack.callback(log.close)
            try:
                outcome = with_all_records(_train(run, work, log, failures, prompts, seen, stack), log, failures)
            except (JobError, UserError, OSError) as error:
                outcome = failed(error)
            seen.operator.look(log)
            outcome = conclude(outcome, run, SimpleNamespace(prompts=prompts), log, failures)  # type: ignore[arg-type]
            seen.failures.append(failures.counts())
            return outcome
    except (JobError, UserError, OSError) as error:
        return failed(error)


def _train(
    run: RunFolder, work: RLJob, log: StepLog, failures: WriteFailures, prompts: Any, seen: Seen, stack: ExitStack
) -> Outcome:
    spec = work.spec
    events = EventLog(run.path, run.attempt, failures=failures)
    stack.callback(events.close)
    failures.tell = lambda what, message, first: (
        events.write("write_failed", what=what) if first and what != EVENTS else None
    )
    tensorboard = TensorBoardSink(run.path, failures)
    stack.callback(tensorboard.close)
    writer = RecordWriter(run.path, log, run.attempt, [tensorboard])
    clock, progress = PhaseClock(on_start=events.phase), Progress()
    calls: Any = Calls()
    trainers: Any = Trainers()
    recovery = Recovery(spec, trainers, calls, clock, run.checkpoints(), writer, prompts, progress, run.attempt, events)
    unrecorded = recovery.restore_latest()
    if unrecorded is not None:
        writer.recover(unrecorded, {})
    seen.operator.look(log)
    clock.restart()
    while progress.step < spec.steps:
        step = progress.step + 1
        with clock.phase("rollout"):
            pass
        sample = {"prompt": "a", "response": "".join(map(str, range(BIG // 4)))}
        write_trajectories(run.path, spec.records, step, [[sample]], failures)
        progress.step = progress.weight_version = step
        if recovery.due_checkpoint():
            with clock.phase("checkpoint"):
                seen.saved.append(int(recovery.save_checkpoint().name.removeprefix("step-")))
        writer.write(step, clock.end_step())
        events.step = recovery.recorded_step = step
        seen.reached = max(seen.reached, step)
        seen.operator.look(log)
    return Outcome(ExitCode.OK, RunOutcome.SUCCEEDED, f"{progress.step} steps done")


def whole(root: Path) -> list[int]:
    """Steps whose checkpoint is complete and as it was written."""
    found = Checkpoints(root)
    return [
        step
        for step in found.complete_steps()
        if not any(damage(found.folder(step), file) for file in found.read(step).files or ())
    ]


def work_of(folder: Path, elsewhere: bool, steps: int = STEPS) -> RLJob:
    path = str(folder / "shared") if elsewhere else None
    records = {"trajectoriesEverySteps": 1}
    return job(steps=steps, checkpoint={"everySteps": 2, "keep": 2, "path": path}, records=records)


@dataclass
class Case:
    """One run on a disk that fails once or from then on, and the runs after it, on one that does not."""

    folder: Path
    fault: Fault
    elsewhere: bool
    before: str = "nothing"
    seen: Seen = field(default_factory=Seen)

    def run(self, injector: Injector) -> Outcome:
        work = work_of(self.folder, self.elsewhere)
        if self.before != "nothing":
            self._begin(injector)
        injector.arm(self.fault)
        try:
            outcome = attempt(self.folder / "run", work, self.seen)
        finally:
            injector.disarm()
        self._nothing_that_was_saved_is_lost()
        self._outcome_is_true(outcome)
        self._the_next_one_ends_it(work)
        return outcome

    def _begin(self, injector: Injector) -> None:
        """Half of the run, with its records in the file or in the checkpoint alone."""
        calls = "write" if self.before == "records in the checkpoint" else "none"
        injector.arm(Fault(self.folder, 1, errno.ENOSPC, calls=calls, contains="/steps.jsonl", forever=True))
        attempt(self.folder / "run", work_of(self.folder, self.elsewhere, STEPS // 2 + 1), self.seen)
        injector.disarm()
        (self.folder / "run" / "summary.json").unlink()

    @property
    def root(self) -> Path:
        return self.folder / "shared" if self.elsewhere else self.folder / "run" / "checkpoints"

    def _nothing_that_was_saved_is_lost(self) -> None:
        sound = whole(self.root)
        if self.seen.saved:
            assert max(sound, default=0) >= self.seen.saved[-1], f"saved {self.seen.saved}, whole are {sound}"

    def _outcome_is_true(self, outcome: Outcome) -> None:
        assert outcome.exit_code in (0, 1), f"exit code {outcome.exit_code}: {outcome.message}"
        said = self.folder / "run" / "summary.json"
        done = said.is_file() and json.loads(said.read_text())["outcome"] == "Succeeded"
        assert done == (outcome.exit_code == 0), f"{outcome}, but the summary says {done}"
        if outcome.exit_code == 0:
            records = read_steps(self.folder / "run")
            assert [record.step for record in records] == list(range(1, STEPS + 1)), "done, but not with each step once"
        else:
            assert str(self.folder) in outcome.message, f"no path in: {outcome.message}"

    def _the_next_one_ends_it(self, work: RLJob) -> None:
        begun_at = max(whole(self.root), default=0)
        outcome = attempt(self.folder / "run", work, self.seen)
        assert outcome.exit_code == 0, f"the next attempt, on a whole disk: {outcome.message}"
        assert self.seen.saved[-1] == STEPS or begun_at == STEPS
        records = read_steps(self.folder / "run")
        assert [record.index for record in records] == list(range(len(records)))
        assert [record.step for record in effective_steps(records)] == list(range(1, STEPS + 1)), "a gap"
        assert sum(not record.rerun for record in records) == STEPS
        assert len({(record.step, record.attempt) for record in records}) == len(records), "one was written twice"
        counted = [
            {name: value for name, value in one.items() if name != "crc32"} for one in self.seen.operator.counted
        ]
        assert counted == [record.to_json() for record in records], "the operator counted others"
        read_events(self.folder / "run")
        assert not list(self.root.glob("*.damaged*")), "a checkpoint was given up for an error that passed"
        left = [entry.name for entry in self.root.iterdir() if "." in entry.name.lstrip(".")]
        assert not [name for name in left if name.endswith(".incomplete")], left


BEFORE = ("nothing", "half a run", "records in the checkpoint")


def cases(calls: int, seed: int, count: int) -> list[tuple[int, int, bool, bool, bool, str]]:
    """(n-th call, errno, for good, half a write, checkpoints elsewhere, what was there), all or some by seed."""
    every = [
        (nth, number, forever, short, elsewhere, before)
        for nth in range(1, calls + 1)
        for number in ERRNOS
        for forever in (False, True)
        for short in (False, True)
        for elsewhere in (False, True)
        for before in BEFORE
    ]
    return random.Random(seed).sample(every, count) if count else every


def faults(folder: Path, injector: Injector, seed: int, count: int) -> dict[str, Any]:
    calm = Case(folder / "calm", Fault(folder / "calm", 1 << 30, 1), elsewhere=True)
    injector.arm(calm.fault)
    outcome = attempt(calm.folder / "run", work_of(calm.folder, True), calm.seen)
    calls = injector.disarm()
    assert outcome.exit_code == 0, outcome
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    for number, (nth, code, forever, short, elsewhere, before) in enumerate(cases(calls, seed, count)):
        place = folder / str(number)
        place.mkdir()
        # A file that is not there is none of the disk's errors; a folder that is not there any more is one.
        calls_of = CHANGES.replace("open,", "") if code == errno.ENOENT else CHANGES
        fault = Fault(place, nth, code, calls_of, forever=forever, short=short)
        case = Case(place, fault, elsewhere, before)
        try:
            ends[f"exit code {case.run(injector).exit_code}"] += 1
        except Exception as error:
            what = f"{errno.errorcode[code]} at call {nth}, {forever=}, {short=}, {elsewhere=}, {before=}"
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        shutil.rmtree(place)
    return {"calls": calls, "ends": ends, "wrong": wrong}


def degraded(folder: Path, injector: Injector) -> dict[str, Any]:
    """Each kind of file that a run can go on without, on a disk that never has room for it."""
    found: dict[str, Any] = {}
    for contains in ("/trajectories", "/tensorboard", "/events.jsonl", "/steps.jsonl", "/summary.json"):
        place = folder / contains.strip("/")
        place.mkdir()
        fault = Fault(place, 1, errno.ENOSPC, calls="write", contains=contains, forever=True)
        case = Case(place, fault, elsewhere=False)
        outcome = case.run(injector)
        found[contains] = {
            "exit_code": outcome.exit_code,
            "message": outcome.message,
            "failures": case.seen.failures[0],
            "reached": case.seen.reached,
            "told": [e["what"] for e in read_events(place / "run") if e["event"] == "write_failed"],
        }
    return found


def exported(folder: Path, injector: Injector) -> str:
    """Output of an export whose weights find no room; a library in Rust writes them."""
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    injector.arm(Fault(folder / "export", 1, errno.ENOSPC, calls="write", contains="/.tmp", forever=True))
    weights = [("model.norm.weight", torch.zeros(1000))]
    try:
        save_hf_folder(folder / "export", weights, {"model_type": "qwen3"}, folder / "tokenizer")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    finally:
        injector.disarm()
    return "nothing"


def main(folder: Path, seed: int, count: int) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    injector = Injector()
    said = {
        "faults": faults(folder, injector, seed, count),
        "degraded": degraded(folder, injector),
        "exported": exported(folder, injector),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
