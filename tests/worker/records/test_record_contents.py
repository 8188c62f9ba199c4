from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_cases import run_folder, write_run, write_samples, write_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rljob_api.phases import PHASES
from rljob_api.reward_parts import LEFT_OUT_KEY, PREFIX
from rljob_api.spec import RecordsSpec
from rljob_api.wire.run_status import RunOutcome
from rljob_api.wire.step_record import StepRecord, WeightSync
from rljob_api.wire.values import WireError
from rljob_worker.errors import UserError
from rljob_worker.host.sealed_json import unsealed
from rljob_worker.phases import StepTiming
from rljob_worker.records.event_names import CHECKPOINT_SET_ASIDE
from rljob_worker.records.events import EventLog
from rljob_worker.records.metrics import JobMetrics
from rljob_worker.records.steps import StepLog, read_steps
from rljob_worker.records.summary import percentile, phase_table, summarize, write_summary
from rljob_worker.records.tensorboard import TensorBoardSink
from rljob_worker.records.trajectories import read_trajectories, write_trajectories
from rljob_worker.records.writer import RecordWriter

REQUIRED = {"step", "attempt", "step_seconds", "phases", "metrics", "weights", "memory", "busy_seconds", "overlapped"}
REQUIRED_METRICS = {
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/loss",
    "train/grad_norm",
    "train/entropy_loss",
    "train/kl_loss",
    "train/train_rollout_logprob_abs_diff",
    "perf/rollout_time",
    "perf/actor_train_time",
    "perf/update_weights_time",
    "perf/step_time",
    "perf/train_wait_time",
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_record_has_every_promised_field(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    for record in lines_of(tmp_path):
        assert record.keys() >= REQUIRED
        assert record["metrics"].keys() >= REQUIRED_METRICS
        assert record["metrics"]["train/kl_loss"] is None
        assert set(record["phases"]) <= set(PHASES)
        assert record["weights"].keys() == {"version", "bytes", "tensors", "verified", "mode"}
        assert record["memory"]["trainer-0"].keys() == {"wake_up", "sleep"}
        assert math.fsum([*record["phases"].values(), record["other"]]) == pytest.approx(
            record["step_seconds"], abs=1e-9
        )
        assert record["metrics"].keys() >= {f"perf/{name}_time" for name in record["phases"]}
        train_wait = record["step_seconds"] - record["phases"]["actor_train"]
        assert record["metrics"]["perf/train_wait_time"] == pytest.approx(train_wait)
        assert record["nested"] == ["perf/train_wait_time"]


def test_what_is_not_finite_becomes_null_and_nothing_leaks_into_the_next_step(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 3, [])
    writer.metrics({"train/loss": math.nan, "train/grad_norm": math.inf, "once": 1.0})
    writer.weights(WeightSync(version=1))
    writer.memory("sleep", {"trainer-0": {"used": 1}, "trainer-1": None})
    first = writer.write(1, StepTiming(1.0, {}), applied=False)
    assert (first.metrics["train/loss"], first.metrics["train/grad_norm"], first.applied) == (
        None,
        None,
        False,
    )
    assert first.memory == {"trainer-0": {"sleep": {"used": 1}}}
    second = writer.write(2, StepTiming(1.0, {}))
    assert "once" not in second.metrics
    assert (second.weights, second.memory, second.attempt) == (None, {}, 3)


def test_sinks_get_what_a_reader_of_the_file_gets(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [seen.append])
    writer.metrics({"x": np.float32(0.5)})
    writer.write(1, StepTiming(1.0, {"rollout": 0.5}))
    assert seen == read_steps(tmp_path)


def test_lanes_beside_the_trainers_are_recorded_and_have_rows_that_sum_to_the_step(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [])
    trainer = {"batch_wait": 0.5, "actor_train": 3.0, "update_weights": 0.25}
    engine = {"rollout": 2.0, "reward_wait": 0.25, "admission_wait": 1.0, "update_weights": 0.25}
    writer.write(1, StepTiming(4.0, trainer, {"engine": engine}))
    (record,) = read_steps(tmp_path)
    assert (record.phases, record.lanes, record.other, record.lane_other("engine")) == (
        trainer, {"engine": engine}, 0.25, 0.5
    )  # fmt: skip
    metrics = record.metrics
    assert (metrics["perf/trainer_bubble"], metrics["perf/engine_bubble"]) == (0.125, 0.3125)
    assert (metrics["perf/rollout_time"], metrics["perf/batch_wait_time"]) == (2.0, 0.5)
    shares = {row.phase: row.share for row in phase_table([record])}
    assert list(shares) == [
        "actor_train", "update_weights", "batch_wait", "other",
        "engine: rollout", "engine: update_weights", "engine: reward_wait", "engine: admission_wait", "engine: other",
    ]  # fmt: skip
    for prefix in (False, True):
        assert sum(share for name, share in shares.items() if name.startswith("engine: ") is prefix) == 1.0
    exported = JobMetrics(4)
    exported(record)
    exported(record)
    text = exported.text().decode()
    for phase, seconds in {**engine, "other": 0.5}.items():
        assert f'rljob_lane_phase_seconds_sum{{lane="engine",phase="{phase}"}} {2 * seconds}\n' in text
    assert 'rljob_phase_seconds_sum{phase="batch_wait"} 1.0\n' in text
    for spoilt in ({"engine": [1]}, {"engine": {"rollout": -1.0}}, [1]):
        with pytest.raises(WireError, match="lanes"):
            StepRecord.parse({**record.to_json(), "lanes": spoilt})


def _samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#") and "_created" not in line]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_histograms_are_the_sums_of_the_records_also_after_a_restart(tmp_path: Path) -> None:
    run_folder(tmp_path)
    log, metrics, random = StepLog(tmp_path), JobMetrics(150), np.random.default_rng(1)
    writer = RecordWriter(tmp_path, log, 1, [metrics])
    for step in (1, 2, 3, 4, 3, 4, 5, 25):
        write_step(writer, random, step)
    log.close()
    rebuilt = JobMetrics(150)
    for record in StepLog(tmp_path).records():
        rebuilt(record)
    before, after = (_samples(m.text().decode()) for m in (metrics, rebuilt))
    assert after == before

    records = read_steps(tmp_path)
    for phase in {name for record in records for name in record.phases}:
        seconds = [record.phases[phase] for record in records if phase in record.phases]
        assert after[f'rljob_phase_seconds_sum{{phase="{phase}"}}'] == pytest.approx(sum(seconds))
        assert after[f'rljob_phase_seconds_count{{phase="{phase}"}}'] == len(seconds)
    phases = sum(value for name, value in after.items() if name.startswith("rljob_phase_seconds_sum"))
    assert phases == pytest.approx(after["rljob_step_seconds_sum"])
    assert after["rljob_step_seconds_count"] == 8
    assert after["rljob_lost_steps_total"] == 2
    assert (after["rljob_step"], after["rljob_target_steps"]) == (25, 150)
    assert after['rljob_device_memory_bytes{process="trainer",rank="0",state="paused"}'] == 700
    assert after['rljob_device_memory_bytes{process="trainer",rank="0",state="used"}'] == 1_000
    assert after['rljob_device_memory_bytes{process="engine",rank="0",state="resident"}'] == 6_025
    assert after["rljob_weights_sync_bytes"] == 1_200_000


def test_an_evaluation_at_the_start_is_step_0_and_no_step(tmp_path: Path) -> None:
    run_folder(tmp_path)
    metrics, board = JobMetrics(150), TensorBoardSink(tmp_path)
    log, random = StepLog(tmp_path), np.random.default_rng(1)
    writer = RecordWriter(tmp_path, log, 1, [metrics, board])
    writer.memory("rollout_wake_kv", {"engine-0": {"resident_bytes": 7}})
    evaluated = {"eval/x": 0.25, "eval/x/pass@1": 0.125}
    writer.write_evaluation_at_start(StepTiming(9.5, {"eval": 9.0}), evaluated, {"engine-0": 8.0}, {"reward": 0.5})
    for step in (1, 2):
        write_step(writer, random, step)
    board.close()
    first, *steps = read_steps(tmp_path)
    assert (first.step, first.is_step, first.phases, first.weights, first.memory) == (0, False, {"eval": 9.0}, None, {})
    assert (first.busy_seconds, first.overlapped) == ({"engine-0": 8.0}, {"reward": 0.5})
    measured = {name: value for name, value in first.metrics.items() if value is not None}
    assert measured == {**evaluated, "perf/eval_time": 9.0}
    assert first.metrics.keys() >= {"rollout/raw_reward", "train/loss"}, "null, as in any record"
    assert [record.step for record in steps] == [1, 2]
    assert log.has(0, 1)

    values = _samples(metrics.text().decode())
    assert (values["rljob_step_seconds_count"], values["rljob_step"]) == (2, 2)
    assert 'rljob_phase_seconds_count{phase="eval"}' not in values
    accumulator = _scalars(tmp_path)
    assert [(event.step, event.value) for event in accumulator.Scalars("eval/x")] == [(0, 0.25)]
    for name in ("perf/step_time", "perf/other_time", "perf/switch_time", "perf/train_wait_time"):
        assert [event.step for event in accumulator.Scalars(name)] == [1, 2], name

    summary = summarize([first, *steps], RunOutcome.SUCCEEDED, "done", 1)
    assert summary == summarize(steps, RunOutcome.SUCCEEDED, "done", 1)
    assert (summary.executed_steps, summary.lost_steps, summary.reward_first) == (2, 0, steps[0].reward)
    again = [first, *steps, replace(first, attempt=2, rerun=True)]
    lost = summarize(again, RunOutcome.FAILED, "killed before its first step", 2)
    assert (lost.steps, lost.executed_steps, lost.lost_steps, lost.reward_last) == (0, 2, 2, None)


def test_a_reward_that_is_not_finite_does_not_show_the_step_before(tmp_path: Path) -> None:
    metrics = JobMetrics(2)
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [metrics])
    for step, reward in ((1, 0.5), (2, math.nan)):
        writer.metrics({"rollout/raw_reward": reward})
        writer.write(step, StepTiming(1.0, {}))
    assert math.isnan(_samples(metrics.text().decode())["rljob_reward_mean"])


def test_parts_of_a_reward_are_series_that_do_not_show_the_step_before(tmp_path: Path) -> None:
    metrics = JobMetrics(2)
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [metrics])
    for step, parts in ((1, {"a": 1.0, "b": 1e305}), (2, {"a": 0.5})):
        writer.metrics({f"{PREFIX}{name}": value for name, value in parts.items()} | {LEFT_OUT_KEY: 2.0})
        written = writer.write(step, StepTiming(1.0, {}))
    assert written.reward_parts() == {"a": 0.5}
    assert read_steps(tmp_path)[0].reward_parts() == {"a": 1.0, "b": None}, "no reader would take a number of that size"
    values = _samples(metrics.text().decode())
    assert values['rljob_reward_part{part="a"}'] == 0.5
    assert math.isnan(values['rljob_reward_part{part="b"}'])
    assert values["rljob_reward_parts_left_out"] == 2


def _scalars(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_the_metrics_back(tmp_path: Path) -> None:
    records = write_run(tmp_path, 20)
    sink = TensorBoardSink(tmp_path)
    for record in records:
        sink(record)
    sink.close()
    accumulator = _scalars(tmp_path)
    for name in records[0].metrics:
        if name == "train/kl_loss":
            continue
        events = accumulator.Scalars(name)
        assert [event.step for event in events] == list(range(1, 21))
        expected = [record.metrics[name] for record in records]
        assert [event.value for event in events] == pytest.approx(expected, rel=1e-6)
        assert events[0].wall_time == pytest.approx(records[0].time)
    assert len(accumulator.Scalars("perf/other_time")) == len(accumulator.Scalars("perf/switch_time")) == 20
    assert "train/kl_loss" not in accumulator.Tags()["scalars"]


def test_tensorboard_forgets_the_steps_that_a_restart_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = write_run(tmp_path, 6)
    now = time.time()
    for attempt, part in ((0, records[:6]), (1, records[3:5])):
        # The name of an event file begins with the second, and TensorBoard reads the files in that order.
        monkeypatch.setattr(time, "time", lambda attempt=attempt: now + attempt)
        sink = TensorBoardSink(tmp_path)
        for record in part:
            sink(record)
        sink.close()
    assert [event.step for event in _scalars(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("limit", "written"), [(None, 12), (12, 12), (100, 12), (11, 8), (8, 8), (7, 4), (4, 4), (3, 3), (1, 1)]
)
def test_a_limit_keeps_whole_groups_as_long_as_it_can(tmp_path: Path, limit: int | None, written: int) -> None:
    samples = [{"prompt": i // 4, "sample": i % 4} for i in range(12)]
    groups = [samples[0:4], samples[4:8], samples[8:12]]
    assert write_trajectories(tmp_path, RecordsSpec.model_validate({"trajectoriesPerStep": limit}), 3, groups)
    assert read_trajectories(tmp_path) == (3, samples[:written])


def test_trajectories_are_written_every_nth_step_and_read_by_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trajectories yet"):
        read_trajectories(tmp_path)
    assert write_trajectories(tmp_path, RecordsSpec.model_validate({"trajectoriesEverySteps": 0}), 5, [[{}]]) is None
    spec = RecordsSpec.model_validate({"trajectoriesEverySteps": 5})
    written = [step for step in range(1, 21) if write_trajectories(tmp_path, spec, step, [[{"s": step}]])]
    assert written == [5, 10, 15, 20]
    write_trajectories(tmp_path, spec, 1_000_000, [[{"s": "late"}]])
    (tmp_path / "trajectories" / "step-000025.jsonl.tmp").write_bytes(b"half")
    assert read_trajectories(tmp_path) == (1_000_000, [{"s": "late"}])
    assert read_trajectories(tmp_path, 10) == (10, [{"s": 10}])
    with pytest.raises(UserError, match="no trajectories of step 7; there are those of step 5, 10, 15, 20, 1000000"):
        read_trajectories(tmp_path, 7)


def test_trajectories_with_anything_in_them_are_json(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, ["a\x1b[2J\nb", "\ud800", "日本"], [0.5, math.nan, 1.0])
    _, samples = read_trajectories(tmp_path)
    assert [sample["response"] for sample in samples] == ["a\x1b[2J\nb", "\ud800", "日本"]
    assert [sample["reward"] for sample in samples] == [0.5, None, 1.0]
    assert samples[1]["reward_parts"] == {"match": None}


def test_a_damaged_trajectory_file_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, ["a" * 1000], [0.5])
    path = tmp_path / "trajectories" / "step-000001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"step-000001\.jsonl\.gz: damaged"):
        read_trajectories(tmp_path)


def test_percentile_interpolates_like_numpy() -> None:
    values = [float(value) for value in np.random.default_rng(0).normal(size=37)]
    for share in (0.0, 0.3, 0.95, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_the_phase_table_is_in_loop_order_and_its_shares_sum_to_one(tmp_path: Path) -> None:
    records = write_run(tmp_path, 60)
    table = phase_table(records)
    names = [row.phase for row in table]
    assert names == [name for name in (*PHASES, "other") if name in names]
    assert {"checkpoint", "eval", "other"} <= set(names)
    assert sum(row.share for row in table) == pytest.approx(1.0)
    steps = {row.phase: row.steps for row in table}
    assert (steps["rollout"], steps["eval"], steps["checkpoint"]) == (60, 2, 1)
    assert phase_table([]) == []


def test_the_summary_counts_lost_work(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [])
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        writer.metrics({"rollout/raw_reward": reward})
        writer.write(step, StepTiming(2.0, {"rollout": 1.0, "sleep": 0.5}), applied=True)
    made = summarize(read_steps(tmp_path), RunOutcome.STOPPED, "why", 2)
    summary = unsealed(write_summary(tmp_path, made).read_text())
    assert summary == made.to_json()
    expected = {"outcome": "Stopped", "message": "why", "attempt": 2, "steps": 2, "executed_steps": 4, "lost_steps": 2}
    assert summary.items() >= expected.items()
    assert (summary["lost_seconds"], summary["reward_first"], summary["reward_last"]) == (4.0, 0.1, 0.25)
    assert (summary["step_seconds_median"], summary["switch_seconds_median"]) == (2.0, 0.5)
    writer.write(3, StepTiming(2.0, {}), applied=False)
    assert summarize(read_steps(tmp_path), RunOutcome.FAILED, "", 2).steps == 2
    assert summarize([], RunOutcome.FAILED, "", 1).steps == 0


def test_fallbacks_are_counted_over_attempts(tmp_path: Path) -> None:
    for attempt, total in ((1, 1.0), (2, 2.0)):
        metrics = JobMetrics(2)
        events = EventLog(tmp_path, attempt, metrics.event)
        events.write("start")
        events.write(CHECKPOINT_SET_ASIDE, folder="step-6.damaged")
        events.close()
        assert f"rljob_checkpoint_fallbacks_total {total}" in metrics.text().decode()
