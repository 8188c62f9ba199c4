from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import ray
import ray.exceptions
from test_run_folder import job

from rljob_api.spec import RewardSpec
from rljob_worker.cluster import calls as driver_calls
from rljob_worker.cluster.actor import Reply
from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.cluster.groups import TrainerGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.learn import Training
from rljob_worker.driver.probe import WeightProbe
from rljob_worker.driver.sync_report import sync_report
from rljob_worker.errors import JobError, PhaseDeadlineError, ProcessDiedError, StopRequested, WeightSyncError
from rljob_worker.flow import Group
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.events import EventLog
from rljob_worker.rollouts.batch import (
    evaluation_sampling,
    rollout_metrics,
    train_batch,
    training_sampling,
)
from rljob_worker.rollouts.step import Step
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import FloatArray, Generation, Prompt, RewardResult, StepMetrics, TrainBatch


def prompt(uid: str, *tokens: int) -> Prompt:
    return Prompt(uid, "s", uid, tokens, None, RewardSpec(name="match"))


def generation(*tokens: int, reason: str = "stop") -> Generation:
    return Generation(np.array(tokens, np.int64), np.full(len(tokens), -0.5, np.float32), reason)


def scored(ordinal: int, of: Prompt, generations: list[Generation], rewards: list[float]) -> Group:
    answered = Group.begun(ordinal, of, len(generations), 0, 3)
    for sample, one in enumerate(generations):
        answered = answered.extended({sample: one}, 3)
    return replace(answered, results=tuple(RewardResult(reward) for reward in rewards))


def test_a_batch_is_prompt_major_and_groups_may_differ_in_size() -> None:
    groups = [
        scored(0, prompt("a", 1, 2), [generation(10), generation(11, 12), generation(13)], [0, 0, 0]),
        scored(1, prompt("b", 3), [generation(14), generation()], [0, 0]),
    ]
    batch = train_batch(groups, np.array([1, -1, 5, 2, -2], np.float32))
    assert batch.tokens.tolist() == [1, 2, 10, 1, 2, 11, 12, 1, 2, 13, 3, 14, 3]
    assert batch.lengths.tolist() == [3, 4, 3, 2, 1]
    assert batch.tokens[batch.sampled].tolist() == [10, 11, 12, 13, 14]
    assert (batch.advantages.tolist(), batch.advantages.dtype) == ([1, -1, -1, 5, 2], np.float32)
    assert batch.rollout_log_probs.tolist() == [-0.5] * 5
    assert batch.versions.tolist() == [3] * 5


def test_rollout_metrics() -> None:
    first = scored(0, prompt("a", 1), [generation(1), generation(1, 2, 3, reason="length")], [0.0, 1.0])
    second = scored(1, prompt("b", 1), [generation(), generation(1, 2)], [0.1, 0.1])
    metrics = rollout_metrics([first, second], np.array([-1, 1, 0, 0], np.float32))
    expected = {
        "rollout/raw_reward": 0.3,
        "rollout/raw_reward_min": 0.0,
        "rollout/raw_reward_max": 1.0,
        "rollout/rewards": 0.0,
        "rollout/response_len/mean": 1.5,
        "rollout/response_len/median": 1.5,
        "rollout/response_len/max": 3,
        "rollout/response_len/min": 0,
        "rollout/truncated_ratio": 0.25,
        "rollout/zero_std/count": 1,
        "rollout/zero_std/ratio": 0.5,
        "rollout/response_tokens": 6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("group", [3, 7, 8, 13])
def test_equal_rewards_have_no_deviation_whatever_rounding_does(value: float, group: int) -> None:
    groups = [scored(i, prompt("a", 1), [generation(1)] * group, [value] * group) for i in range(2)]
    metrics = rollout_metrics(groups, np.zeros(2 * group, np.float32))
    assert metrics["rollout/zero_std/count"] == 2


def test_evaluation_samples_with_its_own_distribution_and_the_jobs_way_of_stopping() -> None:
    spec = job(
        rollout={"topK": 5, "minP": 0.1, "temperature": 0.7, "topP": 0.8, "stop": ["."], "maxResponseTokens": 9},
        evaluation={"data": {"path": "/data/eval.jsonl"}, "temperature": 0.0},
    ).spec
    training, evaluation = training_sampling(spec), evaluation_sampling(spec)
    assert (training.top_k, training.min_p, training.temperature, training.top_p) == (5, 0.1, 0.7, 0.8)
    assert (evaluation.top_k, evaluation.min_p, evaluation.temperature) == (0, 0.0, 0.0)
    assert (evaluation.stop, evaluation.max_tokens) == ((".",), 9)


# --- calls ------------------------------------------------------------------------------------


def calls(stop: threading.Event) -> Calls:
    return Calls(stop, lambda: pytest.fail("interrupted"), lambda name: f"{name} died", lambda what: None)


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.OutOfMemoryError("memory on the node was low"), ray.exceptions.ActorPlacementGroupRemoved()],
)
def test_whatever_ray_says_of_a_process_is_an_end_of_the_job(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(ref: object) -> None:
        raise error

    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(ProcessDiedError, match=f"(?s)start: engine-0 died.*{type(error).__name__}") as died:
        calls(threading.Event()).gather("start", [Call("engine-0", object())], 5)
    assert str(error) in str(died.value)


def test_a_stop_leaves_what_has_nothing_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def wait(refs: list[object], **_: object) -> tuple[list[object], list[object]]:
        stop.set()
        return [], refs

    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(StopRequested):
        calls(stop).gather("start", [Call("trainer-0", object())], 5, until_stop=True)


def test_a_driver_that_was_stopped_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, waits = 0.0, iter([0.2, 60.0, 0.2, 0.2])

    def wait(refs: list[object], timeout: float, **_: object) -> tuple[list[object], list[object]]:
        nonlocal now
        seconds = next(waits, None)
        now += timeout if seconds is None else seconds
        return (refs, []) if seconds is None and ends else ([], refs)

    monkeypatch.setattr(driver_calls, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda ref: Reply("done", 1.0))
    ends = True
    assert calls(threading.Event()).gather("wake_up", [Call("trainer-0", object())], 5) == ["done"]
    assert "the driver did not run for 60 s" in caplog.text
    ends, waits = False, iter([60.0])
    began = now
    with pytest.raises(PhaseDeadlineError, match="wake_up: trainer-0 not finished after 5 s"):
        calls(threading.Event()).gather("wake_up", [Call("trainer-0", object())], 5)
    assert now - began == pytest.approx(65, abs=0.5)


@pytest.mark.parametrize(("each", "late"), [(False, "engine-0, engine-1"), (True, "engine-1")])
def test_a_stream_has_one_deadline_or_one_for_each_of_its_items(
    each: bool, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine 0 gives an item each 3 s, engine 1 one at once and no other; 5 s are allowed."""
    now, given = 0.0, list[tuple[int, float]]()
    steady, silent = iter(range(100)), iter(range(1))

    def wait(refs: list[object], timeout: float, **_: object) -> tuple[list[object], list[object]]:
        nonlocal now
        now += timeout
        due = silent if not given and silent in refs else steady if now >= 3 * len(given) else None
        return ([due], [ref for ref in refs if ref is not due]) if due is not None else ([], refs)

    monkeypatch.setattr(driver_calls, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda ref: Reply(ref, 1.0))
    both = [Call("engine-0", steady), Call("engine-1", silent)]

    def take() -> None:
        for position, _ in calls(threading.Event()).stream("rollout", both, 5, each=each):
            given.append((position, now))

    with pytest.raises(PhaseDeadlineError, match=f"rollout: {late} not finished after 5 s"):
        take()
    assert [position for position, _ in given] == [1, 0]
    assert now == pytest.approx(5.2 if each else 5.0, abs=0.3)


def test_what_nothing_is_awaited_from_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine 0 has nothing to do for 20 s, and is then asked for something that does not come; 5 s are allowed."""
    now, looks = 0.0, 0

    def wait(refs: list[object], timeout: float, **_: object) -> tuple[list[object], list[object]]:
        nonlocal now
        now += timeout
        return [], refs

    def beside() -> list[int]:
        nonlocal looks
        looks += 1
        return [0] if now < 20 else []

    monkeypatch.setattr(driver_calls, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(PhaseDeadlineError, match="rollout: engine-0 not finished after 5 s"):
        list(calls(threading.Event()).stream("rollout", [Call("engine-0", iter([]))], 5, beside=beside))
    assert now == pytest.approx(25, abs=0.3)
    assert looks > 100


# --- probe ------------------------------------------------------------------------------------


def probe(tolerance: float | None = None) -> tuple[WeightProbe, list[FloatArray]]:
    made = WeightProbe(job(weightSync={"probeTolerance": tolerance} if tolerance else {}).spec, 64, 16)
    scores = [np.full(len(tokens) - 1, -2.0, np.float32) for tokens in made.tokens]
    made.score_trainers([None, [], scores])
    return made, scores


def test_probes_fit_model_and_vocabulary() -> None:
    made, _ = probe()
    assert all(len(tokens) == 16 and tokens.min() >= 0 and tokens.max() < 64 for tokens in made.tokens)
    assert len({tokens.tobytes() for tokens in made.tokens}) == len(made.tokens)


@pytest.mark.parametrize(
    ("profile", "precision", "allowed"),
    [("cpu", "fp32", 1e-4), ("cuda", "fp32", 2e-3), ("ascend-a2", "fp32", 2e-3), ("cuda", "bf16", 0.1)],
)
def test_fp32_is_multiplied_with_fewer_digits_on_devices(profile: str, precision: str, allowed: float) -> None:
    made = WeightProbe(job(resources={"profile": profile}, training={"precision": precision}).spec, 64, 16)
    scores = [np.full(len(tokens) - 1, -2.0, np.float32) for tokens in made.tokens]
    made.score_trainers([scores])
    made.compare([[score + 0.9 * allowed for score in scores]], version=3)
    with pytest.raises(JobError, match=rf"allows {allowed:g} "):
        made.compare([[score + 1.1 * allowed for score in scores]], version=3)


def test_the_probe_reports_the_worst_engine() -> None:
    made, scores = probe(0.01)
    near = [score + 0.001 for score in scores]
    metrics = made.compare([scores, near], version=3)
    assert metrics == pytest.approx({"weights/probe_abs_diff_mean": 1e-3, "weights/probe_abs_diff_max": 1e-3}, rel=1e-3)


@pytest.mark.parametrize("wrong", [0.011, -0.011, 1.0, math.nan, math.inf])
def test_the_probe_names_the_engine_that_differs(wrong: float) -> None:
    made, scores = probe(0.01)
    with pytest.raises(JobError, match=r"engine-1 at version 3 .*spec\.weightSync\.probeTolerance allows 0\.01"):
        made.compare([scores, [score + wrong for score in scores]], version=3)


def test_one_token_that_is_not_a_number_fails_the_probe() -> None:
    made, scores = probe()
    bad = [score.copy() for score in scores]
    bad[0][0] = math.nan
    with pytest.raises(JobError, match="engine-0"):
        made.compare([bad], version=1)
    made.score_trainers([bad])
    with pytest.raises(JobError, match="engine-0"):
        made.compare([scores], version=1)


def test_the_probe_needs_all_log_probabilities() -> None:
    made, scores = probe()
    with pytest.raises(JobError, match="engine-0 gave another number"):
        made.compare([[score[1:] for score in scores]], version=1)
    with pytest.raises(JobError, match="no trainer"):
        made.score_trainers([None, None])


# --- events, sync report, stop ---------------------------------------------------------------------


def test_the_last_event_of_a_killed_driver_names_its_phase(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rljob_worker.records.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 1); log.step = 4; log.phase('rollout', 0.0); log.phase('actor_train', 0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_python(code, str(tmp_path)).returncode == -9
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["phase"], last["step"], last["attempt"]) == ("phase", "actor_train", 4, 1)


def test_a_torn_event_does_not_spoil_the_next_attempts_first(tmp_path: Path) -> None:
    first = EventLog(tmp_path, 1)
    first.write("start")
    first.close()
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"time": 1')
    second = EventLog(tmp_path, 2)
    second.write("start")
    assert [event["attempt"] for event in read_events(tmp_path)] == [1, 2]


def test_a_sync_report_counts_bytes_once_and_the_slowest_process() -> None:
    sent = [
        {"bytes": 10, "staging_bytes": 8, "seconds": 1.0, "fill_seconds": 0.5},
        {"bytes": 5, "staging_bytes": 0, "seconds": 2.0},
    ]
    received = [{"tensors": 3, "verified": True, "version": 4, "mode": "load", "seconds": s} for s in (1.0, 3.0)]
    assert sync_report(4, sent, received).to_json() == {
        "version": 4,
        "bytes": 15,
        "staging_bytes": 8,
        "tensors": 3,
        "verified": True,
        "mode": "load",
        "send": {"seconds": 2.0, "fill_seconds": 0.5},
        "receive": {"seconds": 3.0},
    }
    for wrong in ({"verified": False}, {"version": 3}):
        with pytest.raises(WeightSyncError, match=r"engine 1 reports version .* after version 4"):
            sync_report(4, sent, [received[0], {**received[1], **wrong}])


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code, *args], env={"PYTHONPATH": path}, timeout=60, capture_output=True, text=True
    )


STOP = (
    "import os, signal, sys, time; from rljob_worker.driver.stop import StopSignal\n"
    "told = lambda why: print('told', why.split()[0], flush=True)\n"
    "stop = StopSignal(float(sys.argv[1]), lambda: print('killed', flush=True), told); stop.install()\n"
    "os.kill(os.getpid(), {signal}); assert stop.requested.wait(60); print('asked', flush=True)\n"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_is_obeyed_in_time_ends_in_peace(number: int) -> None:
    ended = run_python(STOP.format(signal=int(number)) + "stop.finished(); time.sleep(0.3)", "0.1")
    assert (ended.returncode, ended.stdout) == (0, "asked\n"), ended.stderr


def test_a_stop_that_is_not_obeyed_in_time_ends_the_process() -> None:
    ended = run_python(STOP.format(signal=int(signal.SIGTERM)) + "time.sleep(30)", "0.2")
    assert (ended.returncode, ended.stdout) == (1, "asked\ntold the\nkilled\n")
    assert "spec.checkpoint.graceSeconds = 0.2 s" in ended.stderr


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    ended = run_python(STOP.format(signal=int(signal.SIGINT)) + "os.kill(os.getpid(), 2); time.sleep(30)", "20")
    assert (ended.returncode, ended.stdout) == (1, "asked\ntold interrupted\n")


# --- training --------------------------------------------------------------------------------------


def test_what_is_done_beside_training_is_done_while_the_trainers_are_at_work() -> None:
    order: list[str] = []
    trained = [StepMetrics(applied=True, metrics={}, detail={})]

    def call(method: object, *_: object) -> list[Call[StepMetrics]]:
        assert method is Trainer.train
        order.append("train")
        return []

    def gather(*_: object, **__: object) -> list[StepMetrics]:
        order.append("gather")
        return trained

    trainers = cast(TrainerGroup, SimpleNamespace(call=call))
    training = Training(job().spec, trainers, cast(PhaseCalls, SimpleNamespace(gather=gather)))
    step = Step(1, 0)
    training.actor_train(step, cast(TrainBatch, None), beside=lambda step: order.append(f"step {step.number}"))
    assert order == ["train", "step 1", "gather"]
    assert step.trained is trained
