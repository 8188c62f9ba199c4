"""The phases of some steps, lane by lane, from the driver's events."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from rljob_worker.errors import UserError
from rljob_worker.phases import PhaseClock
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.events import EventLog
from rljob_worker.report.gantt import Bar, draw_gantt, gantt_of


def event(time: float, step: int, phase: str, gap: float = 0.0, attempt: int = 1, **lane: str) -> dict[str, Any]:
    return {"time": time, "attempt": attempt, "step": step, "event": "phase", "phase": phase, "gap": gap, **lane}


TOLD = [
    {"time": 0.0, "attempt": 1, "step": 0, "event": "start"},
    event(1.0, 0, "rollout", 1.0, lane="engine"),
    event(1.0, 0, "batch_wait", 1.0),
    event(2.0, 0, "actor_train", 0.25),
    event(3.5, 0, "admission_wait", 0.0, lane="engine"),
    event(4.0, 0, "update_weights", 0.0),
    event(4.0, 0, "update_weights", 0.0, lane="engine"),
    event(5.0, 0, "rollout", 0.0, lane="engine"),
    event(6.0, 1, "batch_wait", 1.0),
    event(7.0, 1, "actor_train", 0.0),
    {"time": 9.0, "attempt": 1, "step": 2, "event": "end"},
]


def test_a_bar_ends_where_its_phase_ended_and_is_cut_where_the_steps_begin_and_end() -> None:
    gantt = gantt_of(TOLD, range(1, 2))
    assert (gantt.steps, list(gantt.bounds)) == (range(1, 2), [0.0, 5.0])
    assert list(gantt.bars) == [
        Bar("trainer", "batch_wait", 0.0, 0.75),
        Bar("trainer", "actor_train", 1.0, 3.0),
        Bar("trainer", "update_weights", 3.0, 4.0),
        Bar("engine", "rollout", 0.0, 2.5),
        Bar("engine", "admission_wait", 2.5, 3.0),
        Bar("engine", "update_weights", 3.0, 4.0),
        Bar("engine", "rollout", 4.0, 5.0),
    ]
    second = gantt_of(TOLD, range(2, 9))
    assert (second.steps, list(second.bounds)) == (range(2, 3), [0.0, 3.0]), "the run ended there"
    assert second.bars[-1] == Bar("engine", "rollout", 0.0, 3.0)


def test_the_newest_attempt_that_began_the_steps_is_drawn() -> None:
    again = [event(100.0, 1, "actor_train", attempt=2), event(103.0, 2, "actor_train", attempt=2)]
    assert list(gantt_of([*TOLD, *again], range(2, 3)).bars) == [Bar("trainer", "actor_train", 0.0, 3.0)]
    assert gantt_of([*TOLD, *again], range(1, 2)) == gantt_of(TOLD, range(1, 2))
    with pytest.raises(UserError, match=r"events\.jsonl: the run has not begun step 4"):
        gantt_of([*TOLD, *again], range(4, 6))


@given(st.lists(st.tuples(st.sampled_from(["actor_train", "sleep"]), st.floats(0, 5), st.floats(0, 5)), min_size=1))
def test_what_the_clock_tells_the_events_is_what_it_measured(phases: list[tuple[str, float, float]]) -> None:
    now, told = 50.0, list[dict[str, Any]]()
    clock = PhaseClock(lambda: now, lambda name, gap: told.append(event(now, 0, name, gap)))
    for name, before, inside in phases:
        now += before
        with clock.phase(name):
            now += inside
    told.append({"time": now, "attempt": 1, "step": 0, "event": "end"})
    drawn: Counter[str] = Counter()
    gantt = gantt_of(told, range(1, 2))
    for bar in gantt.bars:
        drawn[bar.phase] += bar.end - bar.begin  # type: ignore[assignment]
    for name, seconds in clock.end_step().phases.items():
        assert drawn[name] == pytest.approx(seconds, abs=1e-6)
    assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(gantt.bars))


def test_a_picture_of_events_that_a_driver_wrote(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 1)
    clock = PhaseClock(on_start=log.phase)
    engines = clock.lane("engine", lambda name, gap: log.phase(name, gap, lane="engine"))
    for step in range(3):
        with clock.phase("actor_train"), engines.phase("rollout"):
            pass
        log.step = step + 1
    log.close()
    gantt = gantt_of(read_events(tmp_path), range(1, 3))
    assert [bar.lane for bar in gantt.bars] == ["trainer", "trainer", "engine", "engine"]
    picture = imread(draw_gantt(gantt, "two steps", tmp_path / "lanes.png"))
    assert picture.shape[1] == 1320
    assert (picture[..., :3] != 1.0).any()
