"""Traces of runs: against the format's rules, the records, and what a driver's clock did."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import run_folder
from support.trace_rules import check_trace, lanes_of, read_strictly

from rljob_worker.cli.main import main
from rljob_worker.errors import JobError, UserError
from rljob_worker.phases import PhaseClock
from rljob_worker.records.event_lines import EVENTS_FILE
from rljob_worker.records.events import EventLog
from rljob_worker.records.rank_times import RankTime, RankTimes
from rljob_worker.records.steps import StepLog
from rljob_worker.records.trace_process import TraceProcess
from rljob_worker.records.writer import RecordWriter

OLD_RUN = Path(__file__).parents[1] / "records" / "old_run"
WRITE_SECONDS = 7e-5
"""Seconds that each look at the clock takes here, so that events, phases and records never have the same time."""


class Driven:
    """One attempt as a driver records it, on a clock of the test's."""

    def __init__(self, folder: Path, attempt: int, lanes: bool, now: float) -> None:
        self.now = now
        self.events = EventLog(folder, attempt)
        self.writer = RecordWriter(folder, StepLog(folder), attempt, [])
        self.clock = PhaseClock(self.look, self.events.phase)
        self.sides = {"trainer": self.clock}
        if lanes:
            self.sides["engine"] = self.clock.lane(
                "engine", lambda name, gap: self.events.phase(name, gap, lane="engine")
            )
        self.open = dict[str, contextlib.ExitStack]()
        self.step = 0

    def look(self) -> float:
        """The time, which looking at it moves on."""
        self.now += WRITE_SECONDS
        return self.now

    def enter(self, side: str, phase: str) -> None:
        self.leave(side)
        self.open[side] = contextlib.ExitStack()
        self.open[side].enter_context(self.sides[side].phase(phase))

    def leave(self, side: str) -> None:
        if side in self.open:
            self.open.pop(side).close()

    def end_step(self) -> None:
        self.leave("trainer")
        self.step += 1
        self.writer.ranks([RankTime("trainer-0", "actor_train", self.now - 0.01, self.now)])
        self.writer.write(self.step, self.clock.end_step())
        self.events.step = self.step


@contextlib.contextmanager
def driven(folder: Path, attempt: int = 1, *, lanes: bool = False, now: float = 1.7e9) -> Iterator[Driven]:
    run_folder(folder)
    with pytest.MonkeyPatch.context() as patch:
        one = Driven(folder, attempt, lanes, now)
        patch.setattr(time, "time", one.look)
        one.events.write("start")
        one.now += 3.0
        one.events.write("ready", restored=one.step)
        one.clock.restart()
        yield one
        one.events.close()


Act = tuple[str, ...]
SIDES = st.sampled_from(["trainer", "engine"])
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), SIDES, st.sampled_from(["rollout", "actor_train", "update_weights", "batch_wait"])),
        st.tuples(st.just("leave"), SIDES),
        st.tuples(st.just("pass"), st.sampled_from(["0.0", "0.0002", "0.8", "300"])),
        st.tuples(st.just("end_step")),
    ),
    max_size=40,
)


def act(one: Driven, acts: list[Act]) -> None:
    """Do these things; those of the engines' lane only where there is one."""
    for what, *more in acts:
        if what == "end_step":
            one.end_step()
        elif what == "pass":
            one.now += float(more[0])
        elif more[0] in one.sides:
            getattr(one, what)(*more)


@settings(max_examples=60, deadline=None)
@given(acts=ACTS, again=ACTS, lanes=st.booleans(), gaps=st.booleans())
def test_phases_never_overlap_and_sum_to_the_records_whatever_the_lanes_did_and_where_the_run_was_killed(
    acts: list[Act], again: list[Act], lanes: bool, gaps: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with driven(folder, lanes=lanes) as one:
            act(one, acts)
        with driven(folder, 2, lanes=lanes, now=one.now + 20.0) as other:
            # From the checkpoint before.
            other.step = max(0, one.step - 1)
            act(other, again)
        if not gaps:
            lines = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
            lines = [{key: value for key, value in line.items() if key != "gap"} for line in lines]
            (folder / EVENTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        check_trace(folder)


def test_an_overlapped_run_that_was_killed_and_goes_on(tmp_path: Path) -> None:
    with driven(tmp_path, lanes=True) as one:
        act(one, [("enter", "engine", "rollout"), ("enter", "trainer", "batch_wait"), ("pass", "2"), ("end_step",)])
        act(one, [("enter", "trainer", "actor_train"), ("pass", "1"), ("end_step",), ("pass", "0.5")])
        act(one, [("enter", "trainer", "actor_train"), ("pass", "0.25"), ("enter", "engine", "reward_wait")])
    with driven(tmp_path, 2, lanes=True, now=one.now + 20.0) as other:
        other.step = other.events.step = 2
        act(other, [("enter", "trainer", "update_weights"), ("pass", "1"), ("end_step",)])
        other.events.write("end", outcome="Succeeded")
    events = check_trace(tmp_path)
    lanes = lanes_of(events)
    drawn = {
        key: [(one["name"], one["cat"], round(one["dur"] / 1e6, 2)) for one in slices]
        for key, slices in lanes.items()
        if key[1] != "trainer-0"
    }
    assert drawn == {
        (1, "job"): [("start", "job", 3.0)],
        (1, "steps"): [("step 1", "step", 2.0), ("step 2", "step", 1.0), ("step 3, not recorded", "step", 0.25)],
        (1, "phases of the trainers"): [
            ("batch_wait", "wait", 2.0),
            ("actor_train", "phase", 1.0),
            ("actor_train", "phase", 0.25),
        ],
        # Cut where steps end; in the last one until the next phase began.
        (1, "phases of the engines"): [
            ("rollout", "phase", 2.0),
            ("rollout", "phase", 1.0),
            ("rollout", "phase", 0.75),
            ("reward_wait", "wait", 0.0),
        ],
        (2, "job"): [("start", "job", 3.0)],
        (2, "steps"): [("step 3", "step", 1.0)],
        (2, "phases of the trainers"): [("update_weights", "switch", 1.0)],
        (2, "phases of the engines"): [],
    }
    instants = [(event["pid"], event["name"]) for event in events if event["ph"] == "i"]
    assert (1, "killed, or lost") in instants
    assert (2, "end") in instants
    assert not any("killed" in name for attempt, name in instants if attempt == 2)


def test_each_process_has_a_lane_with_its_own_begin_and_end(tmp_path: Path) -> None:
    with driven(tmp_path) as one:
        one.enter("trainer", "actor_train")
        begin = one.now
        one.now += 2.0
        times = [RankTime(f"trainer-{rank}", "actor_train", begin, begin + 1.0 + rank / 10) for rank in (0, 10, 2)]
        times.append(RankTime("engine-0", "start", begin - 10.0, begin - 4.0))
        one.leave("trainer")
        one.writer.ranks(times)
        one.writer.write(1, one.clock.end_step())
    lanes = lanes_of(check_trace(tmp_path))
    processes = {name: slices for (_, name), slices in lanes.items() if name.startswith(("trainer-", "engine-"))}
    assert list(processes) == ["trainer-0", "trainer-2", "trainer-10", "engine-0"]
    lengths = {name: [(one["name"], one["dur"] / 1e6) for one in slices] for name, slices in processes.items()}
    assert lengths["trainer-2"] == [("actor_train", pytest.approx(1.2, abs=2e-5))]
    assert lengths["engine-0"] == [("start", pytest.approx(6.0, abs=2e-5))], "before the first step"


def test_work_on_another_nodes_clock_is_moved_to_where_the_calls_allow_it() -> None:
    times = RankTimes()
    # Right as far as the driver can see: left as it is.
    times.note("trainer-0", "actor_train", "a", (10.0, 12.0), (10.1, 11.9))
    # 100 s ahead, of which two calls say more than one.
    times.note("trainer-1", "wake_up", "b", (10.0, 11.0), (110.4, 110.9))
    times.note("trainer-1", "actor_train", "c", (20.0, 22.0), (120.0, 121.7))
    found = times.take()
    assert [(one.process, one.what) for one in found][:2] == [("trainer-0", "actor_train"), ("trainer-1", "wake_up")]
    assert (found[0].begin, found[0].end) == (10.1, 11.9)
    assert (found[2].begin, found[2].end) == pytest.approx((20.1, 21.8)), "within what the first call allows too"
    assert times.take() == []


def test_a_stream_is_cut_where_a_step_takes_its_times() -> None:
    times = RankTimes()
    with times.streaming(["s"]):
        times.note("engine-0", "rollout", "s", (10.0, 12.0), (10.5, 11.5))
        times.note("engine-0", "rollout", "s", (10.0, 13.0), (10.5, 12.5))
        assert times.take() == [RankTime("engine-0", "rollout", 10.5, 12.5)]
        assert times.take() == []
        times.note("engine-0", "rollout", "s", (10.0, 15.0), (10.5, 14.5))
    assert times.take() == [RankTime("engine-0", "rollout", 12.5, 14.5)]
    assert times.take() == []


def test_a_run_of_an_older_version_has_its_phases_by_length(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path, dirs_exist_ok=True)
    events = check_trace(tmp_path)
    phases = [event for event in events if event.get("cat") in ("phase", "switch")]
    assert phases
    assert all(event["args"]["placed by length alone"] for event in phases), "it has no events.jsonl"


def test_lines_that_a_lost_disk_left_are_passed_over_and_names_are_text(tmp_path: Path) -> None:
    with driven(tmp_path) as one:
        act(one, [("enter", "trainer", "rollout"), ("pass", "1"), ("end_step",)])
        one.events.write('odd "name"', value=float("nan"), text="</script>\u202e")
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"event": "phase"}\n{"event": "phase", "time": "x", "attempt": 1, "step": 0}\n')
        file.write('{"event": "e", "time": NaN, "attempt": 1, "step": 0}\n{"event": "e", "time": 1, "attempt": []}\n')
    events = check_trace(tmp_path)
    odd = [event["args"] for event in events if event["name"] == 'odd "name"']
    assert odd == [{"step": 1, "value": "nan", "text": "</script>\u202e"}]


@pytest.fixture
def run_of_one_step(tmp_path: Path) -> Path:
    with driven(tmp_path / "run") as one:
        act(one, [("enter", "trainer", "rollout"), ("pass", "1"), ("end_step",)])
    return tmp_path / "run"


def test_the_command_writes_the_trace_packed_or_plain(
    run_of_one_step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_of_one_step.parent / "plain.json"
    assert main(["trace", str(run_of_one_step)]) == 0
    assert str(run_of_one_step / "trace.json.gz") in capsys.readouterr().out
    first = (run_of_one_step / "trace.json.gz").read_bytes()
    assert main(["trace", str(run_of_one_step), "-o", str(plain)]) == 0
    assert main(["trace", str(run_of_one_step)]) == 0
    assert (run_of_one_step / "trace.json.gz").read_bytes() == first
    assert [e["name"] for e in read_strictly(plain.read_text()) if e.get("cat") == "step"] == ["step 1"]


def test_a_driver_has_its_trace_made_by_a_process_of_its_own(run_of_one_step: Path, tmp_path: Path) -> None:
    trace = TraceProcess(run_of_one_step)
    events = read_strictly(gzip.decompress(trace.packed()).decode())
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 1"]
    with pytest.raises(JobError, match="not a run folder"):
        TraceProcess(tmp_path).packed()
    held = threading.Lock()
    trace._lock = held
    with held, pytest.raises(UserError, match="a trace is being made"):
        trace.packed()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "there is no such folder"),
        (lambda folder: folder.mkdir(), "not a run folder (it has no run.json)"),
        (lambda folder: run_folder(folder), "has written no event and no step record yet"),
    ],
)
def test_a_folder_that_is_no_run_is_named(
    make: Callable[[Path], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    make(folder)
    assert main(["trace", str(folder), "-o", str(tmp_path / "out.json")]) == 2
    assert f"{folder}: " in (error := capsys.readouterr().err)
    assert said in error
    assert not (tmp_path / "out.json").exists()
