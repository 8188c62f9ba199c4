"""A run folder as a trace: what the driver, each trainer and each engine did when, over all attempts."""

from __future__ import annotations

import gc
import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_api import metrics as m
from rljob_api.phases import SWITCH_PHASES, TRAINER_LANE, WAITS
from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.trace_events import Lane, TraceEvents, json_text
from rljob_worker.errors import UserError
from rljob_worker.host.files import replacing, this_thread
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import read_steps
from rljob_worker.report.phase_slices import PhaseSlice, phase_slices

TRACE_FILE = "trace.json.gz"
"""In the run folder."""
_CURVES = (m.REWARD_KEY, m.RESPONSE_LENGTH_KEY, "train/grad_norm", m.LOGPROB_KEY)
_KINDS = dict.fromkeys(SWITCH_PHASES, "switch") | dict.fromkeys(WAITS, "wait")
_ENDS = ("end", "failed")
_LEVEL = 4
"""Level of compression: the next ones take longer and save little."""


def build_trace(run_folder: Path, file: Path) -> int:
    """Write the trace of a run that ended, goes on or was killed; returns how many events it has.

    Args:
        run_folder: of the run.
        file: packed where its name ends with `.gz`.

    Raises:
        UserError: not a run folder, or one in which nothing has happened yet.
    """
    run = require_run_folder(run_folder)
    with _without_collector():
        trace = trace_of(read_events(run_folder), read_steps(run_folder), run_folder)
    with replacing(file, durable=False, writer=this_thread()) as target:
        about = {"run": run.name, "attempts": run.attempt}
        if file.suffix == ".gz":
            # Neither name nor time in its head: the same run gives the same bytes.
            with gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as packed:
                packed.writelines(piece.encode() for piece in trace.pieces(about))
        else:
            target.writelines(piece.encode() for piece in trace.pieces(about))
    return len(trace)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing that is made here forms circles, and all of it is kept: to look for garbage takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trace_of(events: Sequence[Mapping[str, Any]], records: Sequence[StepRecord], run_folder: Path) -> TraceEvents:
    """The trace of a run's events and records; UserError where there are none.

    A group of lanes is an attempt: the job, its steps, the phases of trainers and engines, and each process.
    """
    by_attempt: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    steps: dict[int, dict[int, StepRecord]] = defaultdict(dict)
    for event in events:
        if _sound(event):
            by_attempt[event["attempt"]].append(event)
    for record in records:
        steps[record.attempt][record.step] = record
    attempts = sorted({*by_attempt, *steps})
    if not attempts:
        raise UserError(f"{run_folder}: the run has written no event and no step record yet, there is nothing to show")
    begins = [event["time"] for told in by_attempt.values() for event in told[:1]]
    begins += [record.time - record.step_seconds for of_one in steps.values() for record in of_one.values()]
    begins += [begin for of_one in steps.values() for first in [*of_one.values()][:1] for begin in _begins(first)]
    trace = TraceEvents(min(begins))
    for attempt in attempts:
        of_one = sorted(steps[attempt].values(), key=lambda record: record.step)
        _Attempt(trace, attempt, by_attempt[attempt], of_one).draw(newest=attempt == attempts[-1])
    return trace


def _begins(record: StepRecord) -> list[float]:
    return [begin for _, _, begin, _ in record.rank_spans()]


def _sound(event: Mapping[str, Any]) -> bool:
    """Whether it says when it was, and in which attempt and step; a lost disk may leave other lines."""
    get = event.get
    numbered = type(get("attempt")) is int and type(get("step")) is int
    return (
        numbered
        and _is_time(get("time"))
        and _is_time(get("gap", 0.0))
        and (event["event"] != "phase" or isinstance(get("phase"), str))
    )


def _is_time(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


class _Attempt:
    """Draws one attempt.

    Args:
        trace: where.
        number: of the attempt.
        events: of it, in order.
        records: of its steps, in order.
    """

    def __init__(
        self, trace: TraceEvents, number: int, events: Sequence[Mapping[str, Any]], records: Sequence[StepRecord]
    ) -> None:
        self._trace = trace
        self._number = number
        self._events = events
        self._records = records
        self._end = max([*(event["time"] for event in events), *(record.time for record in records)])

    def draw(self, *, newest: bool) -> None:
        """Add all lanes; of the newest attempt it is not known whether it was killed or goes on."""
        self._trace.process(self._number, f"attempt {self._number}")
        self._job(newest)
        phases = phase_slices(self._events, self._records, self._end)
        self._steps(phases[TRAINER_LANE])
        for lane, slices in phases.items():
            self._phases("phases" if len(phases) == 1 else f"phases of the {lane}s", slices)
        self._ranks()
        for record in self._records:
            self._curves(record)

    def _job(self, newest: bool) -> None:
        trace, lane = self._trace, self._trace.lane(self._number, "job")
        named = {event["event"]: event["time"] for event in reversed(self._events) if event["event"] != "phase"}
        ended = next((event["time"] for event in self._events if event["event"] in _ENDS), None)
        last = self._end if ended is None else ended
        stop = named.get("stopping", last)
        if "start" in named:
            self._slice(lane, "start", "job", named["start"], min(named.get("ready", stop), stop))
        if "stopping" in named:
            self._slice(lane, "stop", "job", stop, last)
        for event in self._events:
            if event["event"] != "phase":
                self._event(lane, event)
        if ended is None:
            what = "the last that is known: it goes on, or was killed" if newest else "killed, or lost"
            trace.instant(lane, what, trace.at(self._end), {})

    def _event(self, lane: Lane, event: Mapping[str, Any]) -> None:
        restored = event.get("restored") if event["event"] == "ready" else None
        name = f"resume after step {restored}" if restored else event["event"]
        said = {key: value for key, value in event.items() if key not in ("time", "attempt", "event")}
        self._trace.instant(lane, name, self._trace.at(event["time"]), said)

    def _steps(self, phases: Sequence[PhaseSlice]) -> None:
        lane, end = self._trace.lane(self._number, "steps"), 0.0
        for record in self._records:
            begin = max(record.time - record.step_seconds, end)
            end = max(record.time, begin)
            name = f"step {record.step}" if record.is_step else "evaluation before step 1"
            self._slice(lane, name, "step", begin, end, json_text(_of_step(record)))
        unfinished = [one.begin for one in phases if one.record is None and one.begin >= end]
        if unfinished:
            number = self._records[-1].step + 1 if self._records else max(1, int(self._events[-1]["step"]) + 1)
            self._slice(lane, f"step {number}, not recorded", "step", max(min(unfinished), end), self._end)

    def _phases(self, name: str, slices: Sequence[PhaseSlice]) -> None:
        trace, lane = self._trace, self._trace.lane(self._number, name)
        for one in slices:
            begin, end = trace.at(one.begin), trace.at(one.begin + one.seconds)
            trace.slice(lane, one.phase, _KINDS.get(one.phase, "phase"), begin, end, _of_phase(one))

    def _ranks(self) -> None:
        """A lane for each process, those of a role in the order of their numbers."""
        spans: dict[str, list[tuple[float, float, str, int]]] = defaultdict(list)
        for record in self._records:
            for process, phase, begin, end in record.rank_spans():
                spans[process].append((begin, end, phase, record.step))
        # Trainers before engines.
        for process in sorted(sorted(spans, key=_numbered), key=lambda name: name.startswith("engine")):
            lane, before = self._trace.lane(self._number, process), 0.0
            for begin, end, phase, step in sorted(spans[process]):
                begin = max(begin, before)
                before = max(begin, end)
                self._slice(lane, phase, "rank", begin, before, f'{{"step":{step}}}')

    def _curves(self, record: StepRecord) -> None:
        time = self._trace.at(record.time)
        for name in _CURVES:
            if (value := record.metric(name)) is not None:
                self._trace.counter(self._number, name, time, value)

    def _slice(self, lane: Lane, name: str, kind: str, begin: float, end: float, args: str = "{}") -> None:
        trace = self._trace
        trace.slice(lane, name, kind, trace.at(begin), trace.at(end), args)


def _numbered(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL)
    assert found is not None
    return found[1], int(found[2] or 0)


def _of_step(record: StepRecord) -> dict[str, Any]:
    """Unusual facts about a step, and those that are not easy to see."""
    said: dict[str, Any] = {"step": record.step, "seconds in no phase": round(record.other, 6)}
    flags = {"run again": record.rerun, "update refused": not record.applied, "recorded later": record.recovered}
    said |= {name: True for name, holds in flags.items() if holds}
    if record.overlapped:
        said["seconds beside a phase"] = record.overlapped
    if record.stopped_early:
        said["stopped early"] = record.stopped_early
    return said


def _of_phase(one: PhaseSlice) -> str:
    record = one.record
    if record is None:
        return '{"recorded":false}'
    more: dict[str, Any] = {"placed by length alone": True} if one.by_length else {}
    if one.phase == "update_weights" and (sync := record.weights) is not None:
        # In which order the parts came is not recorded.
        more |= {"verified": sync.verified, "bytes": sync.bytes, "send": sync.send, "receive": sync.receive}
    return json_text({"step": record.step, **more}) if more else f'{{"step":{record.step}}}'
