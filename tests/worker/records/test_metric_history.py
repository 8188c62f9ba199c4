"""The best step, and the step at which a metric stopped getting better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rljob_api.spec import EarlyStopSpec, MetricMode
from rljob_api.wire.step_record import StepRecord
from rljob_worker.phases import StepTiming
from rljob_worker.records.metric_history import (
    EarlyStop,
    best_step,
    end_of_progress,
    name_unknown_metric,
    values_of,
)
from rljob_worker.records.steps import StepLog, read_steps
from rljob_worker.records.writer import RecordWriter

NAME = "eval/held-out"


def record(step: int, value: float | None, attempt: int = 1) -> StepRecord:
    return StepRecord(step, attempt, 0.0, 1.0, {}, 0.0, 0.0, {} if value is None else {NAME: value, "train/loss": 1.0})


def stop_at(**fields: object) -> EarlyStopSpec:
    return EarlyStopSpec.model_validate({"metric": NAME, **fields})


def test_the_values_that_count_are_those_of_the_newest_weights() -> None:
    records = [record(2, 0.5), record(4, 0.9), record(9, 0.99), record(4, 0.1, attempt=2), record(6, 0.2, attempt=2)]
    refused = replace(record(7, 0.8, attempt=2), applied=False)
    assert values_of([*records, refused], NAME) == {2: 0.5, 4: 0.1, 6: 0.2}


def test_the_best_is_the_earliest_of_the_steps_that_are_there() -> None:
    values = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.9}
    assert best_step(values, MetricMode.MAX, [10, 20, 30]) == 20
    assert best_step(values, MetricMode.MIN, [5, 20, 30, 10]) == 10
    assert best_step(values, MetricMode.MAX, [5, 6]) is None


@pytest.mark.parametrize(
    ("fields", "values", "ends"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.2], True),
        ({"patience": 3}, [0.1, 0.2, 0.2, 0.2], False),
        ({"patience": 2}, [0.3, 0.1, 0.2], True),
        ({"patience": 2, "mode": "Min"}, [0.3, 0.2, 0.1], False),
        ({"patience": 2, "mode": "Min"}, [0.1, 0.2, 0.3], True),
        ({"patience": 2, "minChange": 0.2}, [0.1, 0.2, 0.25], True),
        ({"patience": 2, "minChange": 0.2}, [0.1, 0.2, 0.35], False),
        ({"patience": 1, "afterStep": 3}, [0.9, 0.1, 0.2, 0.3], False),
        ({"patience": 1, "afterStep": 3}, [0.1, 0.1, 0.2, 0.1], True),
        ({"patience": 1}, [], False),
    ],
)
def test_a_run_ends_when_its_metric_stops_getting_better(
    fields: dict[str, object], values: list[float], ends: bool
) -> None:
    assert bool(end_of_progress(dict(enumerate(values, 1)), stop_at(**fields))) is ends


def test_the_reason_names_metric_value_and_step() -> None:
    reason = end_of_progress({10: 0.25, 20: 0.5, 30: 0.5, 40: 0.4}, stop_at(patience=2, minChange=0.01))
    assert reason == f"no value of {NAME} in the last 2 was above 0.5 by more than 0.01, that of step 20"
    assert "below 0.1" in end_of_progress({1: 0.1, 2: 0.2}, stop_at(patience=1, mode="Min"))


def test_a_restart_goes_on_counting_and_forgets_what_it_does_again() -> None:
    stop = EarlyStop(stop_at(patience=2), [record(1, 0.5), record(2, 0.4), record(3, 0.3)])
    assert stop.reason()
    stop.continue_after(2)
    assert stop.reason() == ""
    assert stop(record(3, None)) == ""
    assert stop(record(4, 0.3))
    assert EarlyStop(None, [record(1, 0.5)])(record(2, 0.5)) == ""


def test_the_last_record_says_why_and_only_the_last(tmp_path: Path) -> None:
    stop = EarlyStop(stop_at(metric="train/loss", mode="Min", patience=1), [])
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [], early_stop=stop)
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.6)):
        writer.metrics({"train/loss": loss})
        writer.write(step, StepTiming(1.0, {}))
    said = [written.stopped_early for written in read_steps(tmp_path)]
    assert said[:2] == ["", ""]
    assert said[2] == stop.reason() != ""
    assert (tmp_path / "steps.jsonl").read_text().count("stopped_early") == 1


def test_a_metric_that_no_step_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for metric in (NAME, "train/loss", "eval/later"):
        name_unknown_metric("spec.earlyStop.metric", metric, record(1, 0.5))
    assert not caplog.text
    name_unknown_metric("spec.earlyStop.metric", "train/los", record(1, 0.5))
    assert "spec.earlyStop.metric: step 1 has no metric train/los, so that it is without effect" in caplog.text
    assert "there is train/loss" in caplog.text
