"""Rules for a trace: those of Chrome's "Trace Event Format" (Google, 2016), and those from a run's records.

Perfetto drops slices of this format that overlap another one of their lane without lying within it; here that is an
error.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rljob_api.wire.step_record import StepRecord
from rljob_worker.records.steps import read_steps
from rljob_worker.report.trace import build_trace

Event = dict[str, Any]
_MEMBERS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "s", "pid", "tid", "args"},
    "C": {"name", "cat", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
_DESCRIBED = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def read_strictly(text: str) -> list[Event]:
    """The events of a trace; AssertionError where a rule of the format is broken."""
    document = json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    assert isinstance(events, list)
    assert events
    for event in events:
        _check(event)
    named = Counter((event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M")
    assert set(named.values()) == {1}, "something is named twice"
    for event in events:
        assert named["process_name", event["pid"], 0], f"process {event['pid']} has no name"
        if event["ph"] in "Xi":
            assert named["thread_name", event["pid"], event["tid"]], f"{event}: its lane has no name"
    _check_nesting(events)
    return events


def lanes_of(events: Sequence[Event]) -> dict[tuple[int, str], list[Event]]:
    """Slices by process and name of their lane, in order of their begins."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes: dict[tuple[int, str], list[Event]] = {(pid, name): [] for (pid, _), name in names.items()}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        lanes[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return lanes


def check_trace(folder: Path) -> list[Event]:
    """Build a run's trace, check it by the format's rules and against its records; returns its events."""
    file = folder / "checked.json.gz"
    count = build_trace(folder, file)
    events = read_strictly(gzip.decompress(file.read_bytes()).decode())
    file.unlink()
    assert count == len(events)
    lanes = lanes_of(events)
    for (_, name), slices in lanes.items():
        ends = 0
        for one in slices:
            assert one["ts"] >= ends, f"{one} begins before the one before it in {name} ends"
            ends = one["ts"] + one["dur"]
    drawn: Counter[tuple[int, str, int, str]] = Counter()
    for (attempt, lane), slices in lanes.items():
        if lane.startswith("phases"):
            for one in slices:
                drawn[attempt, lane, one["args"].get("step", -1), one["name"]] += one["dur"]
    recorded = _recorded(read_steps(folder), lanes)
    of_steps = {key for key in drawn if key[2] >= 0}
    assert of_steps <= set(recorded), "a phase is in a step whose record has none of it"
    for key, seconds in recorded.items():
        # Half a microsecond at each end of each slice.
        assert drawn[key] / 1e6 == pytest.approx(seconds, abs=5e-5), key
    return events


def _recorded(
    records: Sequence[StepRecord], lanes: dict[tuple[int, str], list[Event]]
) -> dict[tuple[int, str, int, str], float]:
    seconds: dict[tuple[int, str, int, str], float] = {}
    for record in {(record.attempt, record.step): record for record in records}.values():
        alone = (record.attempt, "phases") in lanes
        sides = {"phases" if alone else "phases of the trainers": record.phases}
        sides |= {f"phases of the {lane}s": phases for lane, phases in record.lanes.items()}
        for lane, phases in sides.items():
            seconds |= {(record.attempt, lane, record.step, phase): value for phase, value in phases.items()}
    return seconds


def _check(event: Event) -> None:
    assert set(event) == _MEMBERS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert isinstance(event["args"], dict)
    assert all(type(event[name]) is int and event[name] >= 0 for name in ("pid", "tid")), event
    if event["ph"] == "M":
        member, kind = _DESCRIBED[event["name"]]
        assert set(event["args"]) == {member}
        assert type(event["args"][member]) is kind
        return
    assert type(event["ts"]) is int
    assert event["ts"] >= 0, event
    assert isinstance(event["cat"], str)
    if event["ph"] == "X":
        assert type(event["dur"]) is int
        assert event["dur"] >= 0, event
    elif event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")
    else:
        assert event["args"]
        assert all(type(value) in (float, int) for value in event["args"].values()), event


def _check_nesting(events: Sequence[Event]) -> None:
    by_lane: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_lane[event["pid"], event["tid"]].append(event)
    for slices in by_lane.values():
        open_until: list[int] = []
        for one in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], f"{one} overlaps another"
            open_until.append(one["ts"] + one["dur"])


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    assert len(content) == len(pairs), f"a member is there twice: {[name for name, _ in pairs]}"
    return content


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
