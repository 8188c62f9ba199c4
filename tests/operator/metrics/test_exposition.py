"""The page that Prometheus reads."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import Any

import pytest
from metric_cases import KEY, SPEC, START, condition, exposition, record, run_of, samples, view
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.clocks import work

from rljob_api import metrics as m
from rljob_operator.metrics import JobMetricsStore
from rljob_operator.metrics.lifecycle import REASONS
from rljob_operator.metrics.memory import MOST_RANKS
from rljob_operator.shell.api.metrics import OperatorMetrics

LABELS = 'namespace="team",rljob="qwen"'
HOSTILE = ('a"} 1\nrljob_step{x="', "back\\slash", "%s%d{}", "日本\r\t", "\ud800", 'le="0.1",', "x" * 1_000, "")


def store(now: float = START) -> JobMetricsStore:
    return JobMetricsStore(clock=lambda: now)


def apart(**more: int) -> dict[str, Any]:
    """A job of 2 devices for training and 3 nodes of 2 for engines."""
    group = {"nodes": 3, "devicesPerNode": 2, **more}
    trainer = {"nodes": 1, "devicesPerNode": 2}
    return {**SPEC, "mode": "Async", "resources": {"profile": "cpu", "trainer": trainer, "rollout": group}}


def full_store() -> JobMetricsStore:
    made = store()
    made.feed(KEY, run_of([1, 2, 3, 2, 3]))
    made.observe_status(
        view(
            spec=apart(maxNodes=4),
            phase="Running",
            cluster={"engineNodes": 2},
            attempt=1,
            restarts=1,
            conditions=[condition("Running"), condition("Failed", "False")],
            attempts=[attempt(0, reason="HeadLost", counted=True)],
            goodput={"queuedSeconds": 10.0},
        )
    )
    return made


def attempt(number: int, ended: bool = True, **more: Any) -> dict[str, Any]:
    return {"number": number, **({"endTime": "2027-01-15T08:00:00Z"} if ended else {}), **more}


def test_it_is_valid_and_has_exactly_the_registered_families() -> None:
    text = exposition(full_store()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    expected = {metric.name: metric for metric in (*m.JOB_METRICS, *m.LIFECYCLE_METRICS)}
    assert families.keys() == expected.keys()
    seen = set()
    for name, metric in expected.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.help)
        assert families[name].samples, name
        for sample in families[name].samples:
            labels = {*m.JOB_LABELS, *metric.labels} | ({"le"} if sample.name.endswith("_bucket") else set())
            assert sample.labels.keys() == labels
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in seen
            seen.add(key)


def test_buckets_are_cumulative_and_end_with_the_count() -> None:
    made = store()
    made.feed(KEY, [record(0, phases={"rollout": 0.01}), record(1, phases={"rollout": 4000.0})])
    values = samples(exposition(made))
    bounds = [*(f"{bound}" for bound in m.SECONDS_BUCKETS), "+Inf"]
    row = [values[f'rljob_phase_seconds_bucket{{{LABELS},phase="rollout",le="{bound}"}}'] for bound in bounds]
    assert row == [1.0] * 18 + [2.0], "a bound belongs to its bucket"
    assert values[f'rljob_phase_seconds_sum{{{LABELS},phase="rollout"}}'] == 4000.01


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_stay_inside_their_labels(hostile: str) -> None:
    made, plain = store(), store()
    key = (hostile, hostile[::-1], "u")
    for target, name in ((made, key), (plain, KEY)):
        target.feed(name, [record(0, phases={"rollout": 1.0})])
        target.observe_status(view(name, phase="Running"))
        target.observe_status(view(("other", "job", "u2"), phase="Queued"))
    found = [s for f in text_string_to_metric_families(exposition(made).decode()) for s in f.samples]
    wanted = [s for f in text_string_to_metric_families(exposition(plain).decode()) for s in f.samples]
    assert [(s.name, s.value) for s in found] == [(s.name, s.value) for s in wanted]
    names = {(s.labels["namespace"], s.labels["rljob"]) for s in found}
    shown = tuple(text.encode("utf-8", "replace").decode() for text in key[:2])
    assert names == {shown, ("other", "job")}


def test_the_operators_own_metrics_come_with_the_jobs_and_are_registered() -> None:
    own = OperatorMetrics(CollectorRegistry())
    own.reconcile_seconds.labels("ok").observe(0.02)
    made = JobMetricsStore(own.registry)
    made.feed(KEY, run_of([1]))
    text = exposition(made).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exported = [metric for metric in m.ALL_METRICS if metric not in m.DRIVER_METRICS]
    assert families.keys() == {metric.name for metric in exported}
    assert {name: families[name].type for name in families} == {metric.name: metric.kind for metric in exported}
    values = samples(text.encode())
    assert values['rljob_operator_reconcile_seconds_bucket{le="0.025",result="ok"}'] == 1
    assert "_created" not in text


def test_series_go_with_the_job() -> None:
    made = full_store()
    made.forget(("team", "qwen", "another-uid"))
    assert b'rljob="qwen"' in exposition(made)
    made.forget(KEY)
    assert samples(exposition(made)) == {}
    assert made.next_index(KEY) == -1
    other = full_store()
    other.clear()
    assert exposition(other) == exposition(made)


def test_a_job_made_anew_under_its_name_has_no_series_of_the_old_one() -> None:
    made = full_store()
    new = ("team", "qwen", "uid-2")
    assert made.feed(new, run_of([1], run=3)) == 0, "its predecessor is still there as far as is known"
    made.observe_status(view(new, created=START + 60, phase="Queued"))
    made.observe_status(view(KEY, created=START, phase="Failed"))
    assert made.feed(KEY, run_of([1, 2, 3])) == 0
    assert made.feed(new, run_of([1], run=3)) == 1
    values = samples(exposition(made))
    assert values[f"rljob_step_seconds_count{{{LABELS}}}"] == 1
    assert [name for name in values if name.startswith("rljob_status_phase")] == [
        f'rljob_status_phase{{{LABELS},phase="Queued"}}'
    ]


def memory_series(ranks: int) -> dict[str, float]:
    made = store()
    made.feed(KEY, [record(0, ranks=ranks)])
    return {name: v for name, v in samples(exposition(made)).items() if "device_memory" in name}


def test_memory_has_a_series_for_each_of_few_ranks_and_aggregates_of_many() -> None:
    few, many = memory_series(MOST_RANKS), memory_series(MOST_RANKS + 1)
    assert few[f'rljob_device_memory_bytes{{{LABELS},process="trainer",rank="63",state="used"}}'] == 1_001
    assert few[f'rljob_device_memory_bytes{{{LABELS},process="engine",rank="0",state="resident"}}'] == 6_001
    assert len(few) == MOST_RANKS * 4
    assert len(many) == len(memory_series(5000)) == 4 * 3


def test_aggregates_are_over_ranks() -> None:
    made = store()
    memory = {f"trainer-{rank}": {"sleep": {"used": rank, "moved_bytes": 5}} for rank in range(101)}
    made.feed(KEY, [record(0, memory={**memory, "stranger": {"sleep": {"used": 1}}})])
    values = samples(exposition(made))
    for rank, value in (("min", 0), ("mean", 50), ("max", 100)):
        assert values[f'rljob_device_memory_bytes{{{LABELS},process="trainer",rank="{rank}",state="used"}}'] == value


def restarts(made: JobMetricsStore) -> dict[str, float]:
    values = samples(exposition(made))
    found = {reason: values[f'rljob_restarts_total{{{LABELS},reason="{reason}"}}'] for reason in REASONS}
    return {reason: value for reason, value in found.items() if value}


def test_restarts_are_counted_once_by_reason_however_often_and_late_they_are_seen() -> None:
    listed = [attempt(0, reason="HeadLost", counted=True), attempt(1, reason="Suspended")]
    made = store()
    made.observe_status(view(attempt=1, restarts=1, attempts=[listed[0], attempt(1, ended=False)]))
    for _ in range(3):
        made.observe_status(view(attempt=2, restarts=1, attempts=[*listed, attempt(2, ended=False)]))
        made.observe_status(view(attempt=1, restarts=1, attempts=[listed[0], attempt(1, ended=False)]))
    assert restarts(made) == {"HeadLost": 1}
    counted = {"HeadLost": 1, "PodLost": 9, "Imagined": 2}
    many = [attempt(n, reason="PodLost", counted=True) for n in range(3, 13)]
    late = view(attempt=12, restarts=12, attempts=many, failedAttempts=counted)
    made.observe_status(late)
    assert restarts(made) == {"HeadLost": 1, "PodLost": 9, "Other": 2}
    fresh = store()
    fresh.observe_status(late)
    assert restarts(fresh) == restarts(made), "a restart of the operator moves none to another reason"


def test_restarts_of_a_status_that_does_not_count_them() -> None:
    made = store()
    listed = [attempt(n, reason="PodLost", counted=True) for n in range(2, 12)]
    made.observe_status(view(attempt=11, restarts=12, attempts=listed))
    assert restarts(made) == {"PodLost": 9, "Other": 2}, "the sum is right; what is not listed is Other"


def test_attempts_that_ended_for_a_wrong_hand_over_are_counted() -> None:
    name = f'rljob_weights_verification_failures_total{{{LABELS},source="attempt"}}'
    made = store()
    made.observe_status(view(attempt=0, attempts=[attempt(0, ended=False)]))
    assert samples(exposition(made))[name] == 0
    for _ in range(2):
        made.observe_status(view(attempt=1, attempts=[attempt(0, exitCode=5), attempt(1, exitCode=1)]))
    assert samples(exposition(made))[name] == 1


def test_goodput_is_in_device_seconds_and_the_present_phase_counts() -> None:
    made = store(now=START + 100)
    goodput = {
        "since": "2027-01-15T08:00:50Z",
        "queuedSeconds": 7.0,
        "startingSeconds": 5.0,
        "runningSeconds": 30.0,
        "usefulSeconds": 20.0,
        "lostSeconds": 4.0,
        "abandonedSeconds": 1.0,
    }
    name = "rljob_goodput_device_seconds{" + LABELS + ',state="%s"}'

    def seconds() -> list[float]:
        values = samples(exposition(made))
        return [values[name % state] / 8 for state in ("queued", "starting", "overhead", "useful", "lost")]

    made.observe_status(view(phase="Queued", goodput=goodput))
    assert seconds() == [57.0, 5.0, 6.0, 20.0, 4.0]
    made.observe_status(view(phase="Running", goodput=goodput))
    assert seconds() == [7.0, 5.0, 56.0, 20.0, 4.0]
    made.feed(KEY, [record(0, step_seconds=40.0), record(1, 1, step_seconds=2.0, rerun=True)])
    assert seconds() == [7.0, 5.0, 37.0, 40.0, 3.0], "the records are newer than the status"


def test_without_records_the_status_is_shown() -> None:
    made = store()
    progress = {"step": 30, "steps": 150, "rewardMean": 0.5, "lastStep": {"step": 30, "logProbAbsDiff": 0.01}}
    made.observe_status(view(phase="Succeeded", progress=progress))
    values = samples(exposition(made))
    names = ("rljob_step", "rljob_reward_mean", "rljob_logprob_abs_diff", "rljob_target_steps", "rljob_devices")
    assert [values[f"{name}{{{LABELS}}}"] for name in names] == [30, 0.5, 0.01, 150, 8]


def test_nodes_for_engines_are_counted_where_their_number_may_change() -> None:
    for spec, status, expected in (
        (apart(maxNodes=4), {"cluster": {"engineNodes": 2}}, {"wanted": 3, "taking_part": 2}),
        (apart(maxNodes=4), {"cluster": {}}, {}),
        (apart(maxNodes=4), {}, {}),
        (apart(), {"cluster": {"engineNodes": 3}}, {}),
    ):
        made = store()
        made.observe_status(view(spec=spec, phase="Running", **status))
        found = {name: value for name, value in samples(exposition(made)).items() if "engine_nodes" in name}
        assert found == {f'rljob_engine_nodes{{{LABELS},state="{state}"}}': n for state, n in expected.items()}


def test_an_invalid_spec_and_an_empty_status_give_what_is_known() -> None:
    made = store()
    made.observe_status(view(spec=None, phase="Pending"))
    made.observe_status(view(("team", "empty", "u"), spec=None))
    assert {name.split("{")[0] for name in samples(exposition(made))} == {
        "rljob_status_phase",
        "rljob_restarts_total",
        "rljob_weights_verification_failures_total",
    }


@pytest.mark.parametrize(
    ("since", "records", "expected"),
    [
        ("2027-01-15T08:00:30Z", [], START + 30),
        ("2027-01-15T08:00:30Z", [record(0)], START + 30),
        ("2027-01-15T08:00:30Z", [record(i) for i in range(9)], START + 80),
        (None, [record(i) for i in range(9)], START + 80),
        (None, [], math.nan),
    ],
)
def test_last_progress_is_a_step_or_the_begin_of_running(
    since: str | None, records: list[dict[str, Any]], expected: float
) -> None:
    made = store()
    made.feed(KEY, records)
    made.observe_status(view(conditions=[] if since is None else [condition("Running", time=since)]))
    value = samples(exposition(made)).get(f"rljob_last_progress_timestamp_seconds{{{LABELS}}}", math.nan)
    assert value == pytest.approx(expected, nan_ok=True)


def test_a_scrape_may_be_read_in_parts_while_jobs_come_and_go() -> None:
    made = store()
    for number in range(250):
        made.feed(("team", f"job-{number}", "u"), [record(0, phases={}, memory={})])
    parts = made.parts()
    text = [next(parts), next(parts)]
    made.forget(("team", "job-240", "u"))
    made.feed(("team", "late", "u"), run_of([1]))
    values = samples(b"".join([*text, *parts]))
    assert len([name for name in values if name.startswith("rljob_step{")]) == 250


def kept_bytes(jobs: int, records: int) -> int:
    """Memory that a store takes for jobs with so many records each."""
    tracemalloc.start()
    made = store()
    for number in range(jobs):
        key = ("team", f"job-{number}", "u")
        for start in range(0, records, 50):
            made.feed(key, [record(index) for index in range(start, min(records, start + 50))])
        made.observe_status(view(key, phase="Running", conditions=[condition("Running")]))
    # It also empties the interpreter's own lists of free tuples, which hold up to 2,000 of each length.
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


def test_a_job_takes_little_memory_and_a_counted_record_none() -> None:
    kept_bytes(1, 1)
    assert kept_bytes(100, 1) / 100 < 15_000
    # The window of recent steps is full at 20.
    assert kept_bytes(1, 1050) - kept_bytes(1, 50) < 5_000, "8 bytes a record would be 8,000"


def test_two_hundred_jobs_are_shown_fast() -> None:
    made = store()
    records = run_of([1])
    for number in range(200):
        made.feed(("team", f"job-{number}", "u"), records)
    with work() as taken:
        assert sum(map(len, made.parts())) > 4_000_000
    assert taken.seconds < 0.6, "0.06 s on an idle core"
