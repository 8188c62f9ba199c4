"""Each executed step is counted exactly once, whatever happens between driver and Prometheus."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import KEY, exposition, record, run_of, samples, view

from rljob_api import metrics as m
from rljob_api.reward_parts import LEFT_OUT_KEY, MOST_PARTS, PREFIX
from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError
from rljob_operator.metrics import DriverTotals, JobMetricsStore
from rljob_worker.records.metrics import JobMetrics

LABELS = 'namespace="team",rljob="qwen"'
COUNT = f"rljob_step_seconds_count{{{LABELS}}}"


def store() -> JobMetricsStore:
    return JobMetricsStore(clock=lambda: 0.0)


def fed(records: list[dict[str, Any]]) -> JobMetricsStore:
    made = store()
    made.feed(KEY, records)
    return made


def read_on(made: JobMetricsStore, driver: list[dict[str, Any]], page: int = 1000) -> int:
    """Ask until nothing is left, as the shell does; returns the number of requests."""
    for requests in range(1, 100):
        after = made.next_index(KEY)
        made.feed(KEY, driver[after + 1 : after + 1 + page], total=len(driver))
        if not made.behind(KEY):
            return requests
    raise AssertionError("never done")


def test_the_operator_shows_what_the_driver_shows() -> None:
    records = run_of([1, 2, 3, 4, 3, 4, 5])
    engine = {"rollout": 0.02, "admission_wait": 0.004, "update_weights": 0.5}
    for number in (2, 3, 4):
        records[number]["lanes"] = {"engine": {**engine, "reward_wait": 0.1 * number}}
    made = fed(records)
    made.observe_status(view())
    driver = JobMetrics(150)
    for each in records:
        driver(StepRecord.parse(each))
    of_the_driver_alone = tuple(metric.name for metric in m.DRIVER_METRICS)
    theirs = {
        name: value
        for name, value in samples(driver.text()).items()
        if "_created" not in name and not name.startswith(of_the_driver_alone)
    }
    ours = samples(exposition(made))
    for name, value in theirs.items():
        family, _, rest = name.partition("{")
        # prometheus_client sorts labels by name; the order means nothing.
        given = {*rest.rstrip("}").split(","), *LABELS.split(",")} - {""}
        match = [
            v for n, v in ours.items() if n.startswith(family + "{") and {*n[len(family) + 1 : -1].split(",")} == given
        ]
        assert match == [pytest.approx(value)], name
    assert sum("rljob_lane_phase_seconds_sum" in name for name in ours) == len({*engine, "reward_wait", "other"})


def test_lanes_that_no_version_has_are_counted_together() -> None:
    lanes = {f"lane-{n}": {"rollout": 0.5, f"phase-{n}": 0.25} for n in range(50)}
    found = samples(exposition(fed([record(0, lanes=lanes)])))
    sums = {name: value for name, value in found.items() if name.startswith("rljob_lane_phase_seconds_sum")}
    assert len(sums) == 3, "rollout, other, and phases that are unknown"
    assert {value for name, value in sums.items() if 'phase="rollout"' in name} == {25.0}


steps_of_a_run = st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 6)), min_size=1, max_size=4).map(
    lambda parts: [step for length, start in parts for step in range(1 + start, 1 + start + length)]
)
"""Attempts, each from a step on; from 0 where it begins with an evaluation."""
operations = st.lists(
    st.one_of(
        st.tuples(st.just("page"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("shuffled"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("next"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("status"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(steps=steps_of_a_run, script=operations, seed=st.integers(0, 9))
def test_any_way_of_reading_ends_in_the_counts_of_one_reading(
    steps: list[int], script: list[tuple[str, int, int]], seed: int
) -> None:
    records = run_of(steps)
    once = fed(records)
    once.observe_status(view(phase="Running"))
    made, shown = store(), {}
    for what, low, high in script:
        made = _play(made, records, what, low, high, seed)
        now = _counters(made)
        for name in now.keys() & shown.keys():
            assert now[name] >= shown[name], f"{name} fell after {what}"
        shown.update(now)
    read_on(made, records, page=7)
    made.observe_status(view(phase="Running"))
    assert exposition(made) == exposition(once)
    assert made.driver_totals(KEY) == once.driver_totals(KEY)
    executed = [step for step in steps if step]
    assert samples(exposition(made)).get(COUNT, 0) == len(executed)


def _play(
    made: JobMetricsStore, records: list[dict[str, Any]], what: str, low: int, high: int, seed: int
) -> JobMetricsStore:
    if what == "restart":
        return store()
    if what == "status":
        made.observe_status(view(phase="Running"))
        return made
    after = made.next_index(KEY)
    page = records[after + 1 : after + 1 + low] if what == "next" else records[low : max(low, high)]
    page = [] if what == "empty" else list(page)
    if what == "shuffled":
        page += page[:3]
        random.Random(seed).shuffle(page)
    made.feed(KEY, page, total=len(records))
    return made


def _counters(made: JobMetricsStore) -> dict[str, float]:
    endings = ("_total{", "_count{", "_bucket{", "_sum{")
    return {name: v for name, v in samples(exposition(made)).items() if any(ending in name for ending in endings)}


def test_a_rebuild_is_not_shown_before_it_is_complete() -> None:
    records = run_of(range(1, 31))
    made = store()
    made.feed(KEY, records[:10], total=30)
    assert (made.behind(KEY), made.next_index(KEY)) == (20, 8)
    assert COUNT not in samples(exposition(made))
    assert read_on(made, records, page=10) == 3
    assert samples(exposition(made))[COUNT] == 30
    made.feed(KEY, records[29:], total=31)
    assert samples(exposition(made))[COUNT] == 30, "one record late is no rebuild"


def test_a_gap_is_not_counted_over() -> None:
    records = run_of(range(1, 9))
    made = store()
    assert made.feed(KEY, records[:3]) == 3
    assert made.feed(KEY, records[5:]) == 0
    assert made.feed(KEY, records[2:6]) == 3
    assert samples(exposition(made))[COUNT] == 6


@pytest.mark.parametrize("length", [1, 5, 10, 14])
def test_a_replaced_run_folder_starts_anew(length: int) -> None:
    old, new = run_of(range(1, 11)), run_of(range(1, length + 1), run=5)
    made = fed(old)
    after = made.next_index(KEY)
    made.feed(KEY, new[after + 1 :], total=length)
    assert made.next_index(KEY) == -1, "all of it is asked for"
    read_on(made, new)
    assert exposition(made) == exposition(fed(new))


def test_a_replaced_run_folder_is_recognised_by_its_first_record() -> None:
    made = fed(run_of(range(1, 11)))
    new = run_of(range(1, 4), run=5)
    assert made.feed(KEY, new) == 3
    assert exposition(made) == exposition(fed(new))


def test_steps_that_ran_again_are_lost_work() -> None:
    records = run_of([1, 2, 3, 4, 3, 4, 5])
    seconds = [each["step_seconds"] for each in records]
    totals = fed(records).driver_totals(KEY)
    assert totals.lost_steps == 2
    assert totals.lost_seconds == pytest.approx(seconds[4] + seconds[5])
    assert totals.useful_seconds + totals.lost_seconds == pytest.approx(sum(seconds))
    assert totals.median_step_seconds == pytest.approx(sorted(seconds)[3])
    assert totals.last is not None
    assert (totals.last.step, totals.last.weight_version, totals.last.reward) == (5, 5, pytest.approx(0.255))
    assert store().driver_totals(KEY) == DriverTotals()


def test_an_evaluation_at_the_start_is_read_and_counted_nowhere() -> None:
    at_start = record(0, 0, step_seconds=900.0, phases={"eval": 900.0}, weights={}, memory={}, metrics={"eval/x": 0.5})
    made = fed([at_start])
    made.observe_status(view(phase="Running"))
    assert made.next_index(KEY) == -1, "it is compared when it comes again"
    assert made.driver_totals(KEY) == DriverTotals()
    values = samples(exposition(made))
    assert not [name for name in values if name.startswith(("rljob_phase_seconds", "rljob_step", "rljob_lost"))]
    rest = [record(1, 1), record(2, 2), {**at_start, "index": 3, "rerun": True}, record(4, 1, rerun=True)]
    steps = [
        {**each, "index": index} for index, each in enumerate((record(1, 1), record(2, 2), record(4, 1, rerun=True)))
    ]
    made, without = fed([at_start, *rest]), fed(steps)
    assert exposition(made) == exposition(without)
    assert made.driver_totals(KEY) == without.driver_totals(KEY)
    assert made.driver_totals(KEY).lost_steps == 1


def test_the_median_is_over_the_recent_steps() -> None:
    records = [record(i, step_seconds=100.0 if i < 50 else 1.0 + i / 1000) for i in range(70)]
    assert fed(records).driver_totals(KEY).median_step_seconds == pytest.approx(1.0 + 59.5 / 1000)


def test_a_step_that_was_not_applied_is_executed_but_not_completed() -> None:
    values = samples(exposition(fed([record(0), record(1, applied=False)])))
    assert values[COUNT] == 2
    assert values[f"rljob_step{{{LABELS}}}"] == 1


def test_values_that_a_step_lacks_are_not_those_of_the_step_before() -> None:
    bare = record(1, metrics={}, weights={}, memory={})
    text = exposition(fed([record(0), bare]))
    values = samples(text)
    for metric in (m.REWARD_MEAN, m.RESPONSE_LENGTH, m.LOGPROB_ABS_DIFF, m.SYNC_BYTES):
        name = metric.name
        assert math.isnan(values[f"{name}{{{LABELS}}}"])
    assert b"rljob_device_memory_bytes{" not in text


def test_parts_of_a_reward_have_a_bounded_number_of_series_whatever_the_driver_sends() -> None:
    def metrics(*names: str) -> dict[str, float]:
        return {f"{PREFIX}{name}": 0.25 for name in names} | {LEFT_OUT_KEY: 3.0}

    many = [f"p{i:02}" for i in range(MOST_PARTS - 1)]
    values = samples(
        exposition(fed([record(0, metrics=metrics("first")), record(1, metrics=metrics(*many, 'x"}', "late"))]))
    )
    shown = {name for name in values if name.startswith("rljob_reward_part{")}
    assert shown == {f'rljob_reward_part{{{LABELS},part="{name}"}}' for name in ("first", *many)}
    assert values[f'rljob_reward_part{{{LABELS},part="p00"}}'] == 0.25
    assert math.isnan(values[f'rljob_reward_part{{{LABELS},part="first"}}']), "not that of the step before"
    assert values[f"rljob_reward_parts_left_out{{{LABELS}}}"] == 3 + 2


def test_phases_of_another_version_keep_the_sum_and_the_number_of_series() -> None:
    phases = {f"phase {i}": 0.5 for i in range(1000)} | {"rollout": 2.0}
    values = samples(exposition(fed([record(0, phases=phases)])))
    assert values[f'rljob_phase_seconds_sum{{{LABELS},phase="unknown"}}'] == 500
    assert len([name for name in values if name.startswith("rljob_phase_seconds_count")]) == 3


def test_an_unverified_hand_over_is_counted() -> None:
    made = fed([record(0), record(1, weights={"version": 1, "bytes": 1, "verified": False})])
    assert samples(exposition(made))[f'rljob_weights_verification_failures_total{{{LABELS},source="record"}}'] == 1


def test_failures_of_environments_add_up_by_class_with_their_zeros() -> None:
    def metrics(infra: float, invalid: float) -> dict[str, float]:
        failures = {"infra": infra, "data": 0.0, "replay": 0.0}
        found = {f"rollout/episodes/failures/{kind}": count for kind, count in failures.items()}
        return found | {"rollout/episodes/invalid_actions": invalid}

    made = fed([record(0, metrics={}), record(1, metrics=metrics(2.0, 5.0)), record(2, metrics=metrics(1.0, 0.0))])
    values = samples(exposition(made))
    found = {name: value for name, value in values.items() if "environment_failures" in name}
    expected = {"infra": 3, "data": 0, "replay": 0, "policy": 5}
    assert found == {
        f'rljob_environment_failures_total{{{LABELS},class="{kind}"}}': count for kind, count in expected.items()
    }
    assert not any("environment_failures" in name for name in samples(exposition(fed([record(0, metrics={})]))))


BROKEN: list[tuple[Any, str]] = [
    ([], "must be an object, not list"),
    ({**record(3), "index": -1}, "index must be a whole number from 0, not -1"),
    ({**record(3), "index": True}, "index must be a whole number"),
    ({**record(3), "step": 1.5}, "step record 3: step must be a whole number from 0, not 1.5"),
    ({**record(3), "step": 10**5000}, "step record 3: step must be a whole number from 0, not int"),
    ({**record(3), "attempt": None}, "step record 3: attempt must be a whole number from 0, not None"),
    ({**record(3), "step_seconds": math.nan}, "step_seconds must be a finite number, not nan"),
    ({**record(3), "step_seconds": 10**400}, "step_seconds must be a finite number, not int"),
    ({**record(3), "step_seconds": -1.0}, "step_seconds must not be negative, but is -1"),
    ({**record(3), "step_seconds": 1e299}, "step_seconds must be at most 1e+09, but is 1e+299"),
    ({**record(3), "phases": {"rollout": 1e10}}, "phases.rollout must be at most 1e+09, but is 1e+10"),
    ({**record(3), "time": "noon"}, "time must be a finite number, not 'noon'"),
    ({**record(3), "phases": None}, "phases must be an object, not None"),
    ({**record(3), "phases": {"rollout": "1"}}, "phases.rollout must be a finite number, not '1'"),
    ({**record(3), "metrics": {"rollout/raw_reward": []}}, "metrics.rollout/raw_reward must be a finite number"),
    ({**record(3), "metrics": {f"{PREFIX}a": "1"}}, "metrics.rollout/reward_parts/a must be a finite number, not '1'"),
    (
        {**record(3), "metrics": {"rollout/episodes/failures/infra": -1.0}},
        "failures/infra must not be negative",
    ),
    ({**record(3), "metrics": {LEFT_OUT_KEY: "many"}}, "reward_parts_left_out must be a finite number, not 'many'"),
    ({**record(3), "weights": {"version": "x"}}, "weights: version must be a whole number"),
    ({**record(3), "memory": {"trainer-0": 7}}, "memory.trainer-0 must hold an object"),
    ({**record(3), "memory": {"trainer-0": {"sleep": {"used": math.inf}}}}, "memory.trainer-0 must be a finite number"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_a_broken_record_is_named_and_counts_nothing(broken: Any, message: str) -> None:
    made = fed([record(0), record(1)])
    before = exposition(made)
    with pytest.raises(WireError) as caught:
        made.feed(KEY, [record(2), broken], total=4)
    assert message in str(caught.value)
    assert exposition(made) == before
    assert made.feed(KEY, [record(2), record(3)], total=4) == 2
