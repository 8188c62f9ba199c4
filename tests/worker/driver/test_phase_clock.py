from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.phases import PHASES, SWITCH_PHASES, WAITS
from rljob_worker.phases import PhaseClock

SECONDS = st.floats(0, 1e4, allow_nan=False)
STEPS = st.lists(st.lists(st.tuples(SECONDS, st.sampled_from(PHASES), SECONDS), max_size=12), min_size=1, max_size=4)


@given(STEPS, st.lists(SECONDS, min_size=4, max_size=4))
def test_phases_are_disjoint_and_sum_with_other_to_the_step(
    steps: list[list[tuple[float, str, float]]], tails: list[float]
) -> None:
    """Each step is a list of (seconds outside a phase, phase, seconds inside it), and a rest."""
    now = 0.0
    clock = PhaseClock(now=lambda: now)
    begin = now
    for step, tail in zip(steps, tails, strict=False):
        inside: dict[str, float] = {}
        outside = tail
        for gap, name, seconds in step:
            now += gap
            outside += gap
            with clock.phase(name):
                assert clock.current == name
                now += seconds
            inside[name] = inside.get(name, 0.0) + seconds
        now += tail
        timing = clock.end_step()
        assert timing.step_seconds == now - begin
        assert timing.phases.keys() == inside.keys()
        assert timing.phases == pytest.approx(inside, abs=1e-6)
        assert timing.other == pytest.approx(outside, abs=1e-6)
        assert math.fsum([*timing.phases.values(), timing.other]) == pytest.approx(timing.step_seconds, abs=1e-9)
        assert timing.switch == pytest.approx(math.fsum(inside.get(name, 0.0) for name in SWITCH_PHASES), abs=1e-6)
        begin = now


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.sampled_from(PHASES), SECONDS), max_size=12), min_size=1, max_size=4)
)
def test_each_lane_sums_to_the_same_step_and_what_goes_on_is_cut_at_its_end(
    steps: list[list[tuple[bool, str, float]]],
) -> None:
    """Each step is a list of (whether the lane beside it enters its next phase, that phase, seconds until then)."""
    now = 0.0
    clock = PhaseClock(now=lambda: now)
    beside = clock.lane("engine")
    with ExitStack() as own, ExitStack() as others:
        own.enter_context(clock.phase("actor_train"))
        for step in steps:
            inside: dict[str, float] = {}
            passed = 0.0
            for enters, name, seconds in step:
                if enters:
                    others.close()
                    others.enter_context(beside.phase(name))
                now += seconds
                passed += seconds
                if beside.current is not None:
                    inside[beside.current] = inside.get(beside.current, 0.0) + seconds
            so_far = clock.so_far()
            timing = clock.end_step()
            assert timing.step_seconds == pytest.approx(passed, abs=1e-6)
            assert timing.phases == pytest.approx({"actor_train": passed}, abs=1e-6)
            measured = timing.lanes["engine"]
            assert all(measured.get(n, 0.0) == pytest.approx(inside.get(n, 0.0), abs=1e-6) for n in PHASES)
            assert so_far.lanes["engine"] == pytest.approx(timing.lanes["engine"], abs=1e-6)
            waits = sum(inside.get(name, 0.0) for name in WAITS)
            assert timing.bubble(timing.lanes["engine"]) * timing.step_seconds == pytest.approx(waits, abs=1e-5)


def test_steps_that_end_while_another_thread_enters_phases_lose_no_time() -> None:
    """The sums over all steps are what passed in each lane, wherever the steps were cut."""
    clock = PhaseClock()
    beside = clock.lane("engine")
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            with beside.phase("rollout"):
                pass
            with beside.phase("reward_wait"):
                pass

    clock.restart()
    thread = threading.Thread(target=work)
    thread.start()
    timings = [clock.end_step() for _ in range(5000)]
    ended.set()
    thread.join()
    for timing in timings:
        assert all(seconds >= 0 for seconds in timing.lanes["engine"].values())
        assert math.fsum(timing.lanes["engine"].values()) <= timing.step_seconds + 1e-9
    assert sum(math.fsum(timing.lanes["engine"].values()) for timing in timings) > 0


def test_a_restart_is_one_of_all_lanes() -> None:
    now = 0.0
    clock = PhaseClock(now=lambda: now)
    beside = clock.lane("engine")
    with beside.phase("eval"):
        now = 5.0
        assert clock.running_beside() == {"engine": "eval"}
    assert clock.running_beside() == {}
    clock.restart()
    now = 7.0
    assert (clock.end_step().lanes, beside.running()) == ({"engine": {}}, (None, 2.0))


def test_a_sleep_between_two_phases_appears_in_other_alone() -> None:
    clock = PhaseClock()
    clock.restart()
    with clock.phase("rollout"):
        time.sleep(0.02)
    time.sleep(0.2)
    with clock.phase("wake_up"):
        time.sleep(0.02)
    timing = clock.end_step()
    assert timing.other >= 0.2
    assert all(0.02 <= timing.phases[name] < 0.2 for name in ("rollout", "wake_up"))
    assert sum(timing.phases.values()) + timing.other == pytest.approx(timing.step_seconds)


def test_what_follows_a_step_belongs_to_the_next_and_start_up_to_none() -> None:
    now = 100.0
    clock = PhaseClock(now=lambda: now)
    now = 200.0
    clock.restart()
    now = 201.0
    assert clock.end_step().step_seconds == 1.0
    now = 204.0
    assert clock.end_step().step_seconds == 3.0


def test_phases_cannot_nest_and_must_be_known() -> None:
    clock = PhaseClock()
    with clock.phase("rollout"), pytest.raises(AssertionError, match="inside phase rollout"), clock.phase("reward"):
        pass
    with pytest.raises(AssertionError), clock.phase("lunch"):
        pass


def test_an_error_ends_the_phase_and_its_time_counts() -> None:
    now = 0.0
    started: list[tuple[str, float]] = []
    clock = PhaseClock(now=lambda: now, on_start=lambda name, gap: started.append((name, gap)))

    def fail() -> None:
        nonlocal now
        with clock.phase("rollout"):
            now = 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert clock.current is None
    now = 2.5
    with clock.phase("reward"):
        pass
    assert clock.end_step().phases == {"rollout": 2.0, "reward": 0.0}
    assert started == [("rollout", 0.0), ("reward", 0.5)]


def test_it_tells_how_long_a_phase_has_run_and_for_how_long_none_has() -> None:
    now = 10.0
    clock = PhaseClock(lambda: now)
    now = 15.0
    assert clock.running() == (None, 5.0)
    with clock.phase("rollout"):
        now = 18.0
        assert clock.running() == ("rollout", 3.0)
        assert clock.current == "rollout"
    now = 20.0
    assert clock.running() == (None, 2.0)
    clock.restart()
    assert clock.running() == (None, 0.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.booleans()), min_size=1, max_size=8))
def test_what_is_attributed_to_another_phase_is_taken_from_the_open_one(parts: list[tuple[float, float, bool]]) -> None:
    now = 0.0
    clock = PhaseClock(now=lambda: now)
    clock.restart()
    total = moved = 0.0
    with clock.phase("rollout"):
        for seconds, waited, cut in parts:
            now += seconds
            total += seconds
            # A step that ended meanwhile has its part.
            if cut:
                timing = clock.end_step()
                assert math.fsum(timing.phases.values()) == pytest.approx(timing.step_seconds, abs=1e-6)
                total = moved = 0.0
            left = total - moved
            clock.attribute("env_wait", waited)
            moved += min(waited, left)
            assert clock.so_far().phases.get("env_wait", 0.0) == pytest.approx(moved, abs=1e-6)
    timing = clock.end_step()
    assert timing.phases["rollout"] == pytest.approx(total - moved, abs=1e-6)
    assert timing.step_seconds == pytest.approx(total, abs=1e-6)
    assert timing.phases["rollout"] >= 0
