"""Whole jobs on this machine: real Ray, Megatron and vLLM."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import REPOSITORY, alive, events, final_state, finish, manifest, run, start, start_faulty, wait_for
from support.samples import unless_drawn
from support.step_lines import read_steps
from support.trace_rules import check_trace, lanes_of

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.records.token_files import read_tokens
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12
METRICS = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/loss",
    "train/grad_norm",
    "train/entropy_loss",
    "train/kl_loss",
    "train/train_rollout_logprob_abs_diff",
    "perf/actor_train_time",
    "perf/update_weights_time",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("finished")
    kl = {"name": "grpo", "kl": {"monitor": True}}
    job = manifest(folder, algorithm=kl, steps=STEPS)
    code, output = run("run", job, "--output", folder / "run", cold=True)
    assert code == 0, output
    assert f"Succeeded: {STEPS} steps done" in output
    assert "report.png" in output
    (folder / "said").write_text(output)
    return folder / "run"


def test_a_run_that_succeeds_says_nothing_that_frightens(finished: Path) -> None:
    said = (finished.parent / "said").read_text()
    assert not re.search(r"(?i)warn|error|fail|died|kill|raylet|exception|traceback|lost", said), said


def test_records_hold_what_the_issue_asks_for(finished: Path) -> None:
    records = read_steps(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert not set(METRICS) - set(record["metrics"]), "missing metrics"
        assert all(record["metrics"][name] is not None for name in METRICS)
        assert record["attempt"] == 1
        assert not record["rerun"]
        assert record["weights"]["verified"] is True
        assert record["weights"]["version"] == record["step"]
        assert record["weights"]["bytes"] > 0
        assert record["weights"]["mode"] == "load"
        assert {"trainer-0", "engine-0"} <= set(record["memory"])
        assert {"trainer-0", "engine-0"} <= set(record["busy_seconds"])
        assert sum(record["phases"].values()) + record["other"] == pytest.approx(record["step_seconds"])
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_most_of_a_step_is_in_its_phases(finished: Path) -> None:
    """By the shortest `other` of all steps: a machine that does other things too makes most of them longer."""
    records = read_steps(finished)
    assert min(record["other"] / record["step_seconds"] for record in records) < 0.5


def test_arena_gives_its_pages_back(finished: Path) -> None:
    asleep = read_steps(finished)[-1]["memory"]["trainer-0"]["sleep"]
    assert asleep["backup_bytes"] > 0


def test_export_loads_in_transformers_and_is_what_was_trained(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, output = run("export", finished, "--step", str(STEPS), "--to", tmp_path / "hf")
    assert code == 0, output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == model.config.vocab_size
    # Whoever serves the model is seldom who trained it.
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "hf").iterdir()}
    assert set(modes.values()) == {"0o644"}, "as the umask says"
    assert (finished / "report.html").stat().st_mode & 0o777 == 0o600, "it shows the manifest's variables"
    assert (model.generation_config.do_sample, model.generation_config.max_new_tokens) == (True, 4)
    code, output = run("export", finished, "--step", "5", "--to", tmp_path / "other")
    assert code == 2
    assert f"complete ones: {STEPS - 2}, {STEPS}" in output


def test_a_trace_has_each_process_at_work_within_its_phases(finished: Path) -> None:
    lanes = lanes_of(check_trace(finished))
    phases = lanes[1, "phases"]
    ends = [following["ts"] for following in phases[1:]]
    for process, phase in (("trainer-0", "actor_train"), ("engine-0", "rollout")):
        works = [one for one in lanes[1, process] if one["name"] == phase and one["args"]["step"] > 1]
        assert {one["args"]["step"] for one in works} == set(range(2, STEPS + 1))
        for one in works:
            # The records round to 10 microseconds.
            around = [
                (begun["ts"] - 20, end + 20)
                for begun, end in zip(phases, ends)
                if begun["name"] == phase and begun["args"]["step"] == one["args"]["step"]
            ]
            assert any(begin <= one["ts"] and one["ts"] + one["dur"] <= end for begin, end in around), one


def test_samples_and_summary(finished: Path) -> None:
    code, output = run("samples", finished, "--step", "3", "--worst", "2")
    assert code == 0, output
    assert "2 of 16 samples" in output
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["lost_steps"]) == ("Succeeded", STEPS, 0)


def test_each_sampled_token_has_the_engine_s_and_the_trainer_s_log_probability(finished: Path) -> None:
    for record in read_steps(finished):
        _, rows = read_trajectories(finished, record["step"])
        tokens = read_tokens(finished, record["step"])
        found = [tokens.of(row) for row in rows]
        assert [len(one.texts) for one in found if one is not None] == [row["response_tokens"] for row in rows]
        apart = [abs(value) for one in found if one is not None for value in one.differences or ()]
        assert len(apart) == record["metrics"]["rollout/response_tokens"]
        # Three digits of each stand in the file.
        assert sum(apart) / len(apart) == pytest.approx(
            record["metrics"]["train/train_rollout_logprob_abs_diff"], rel=1e-2
        )
    code, output = run("samples", finished, "--step", "3", "--worst", "2", "--tokens")
    assert code == 0, output
    assert output.count("tokens        engine    trainer     ratio  text") == 2


def test_sigterm_saves_the_last_completed_step_and_resume_continues(finished: Path, tmp_path: Path) -> None:
    kl = {"name": "grpo", "kl": {"monitor": True}}
    # Which changes no bit.
    beside = {"profile": {"firstStep": 2, "steps": 2}, "otlp": {"endpoint": "http://127.0.0.1:9"}}
    job = manifest(tmp_path, algorithm=kl, checkpoint={"everySteps": 1000, "keep": 2}, steps=STEPS, records=beside)
    process = start("run", job, "--output", tmp_path / "run")
    wait_for(lambda: len(_steps(tmp_path / "run")) >= 2, "two steps")
    # To the whole group, as `timeout` does.
    os.killpg(process.pid, signal.SIGTERM)
    code, output = finish(process, 60)
    assert code == ExitCode.STOPPED, output
    done = len(_steps(tmp_path / "run"))
    assert f"saved step-{done}" in output
    code, output = run("run", job, "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    records = read_steps(tmp_path / "run")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1)), "no step is lost or run twice after a clean stop"
    assert [r["attempt"] for r in records] == [1] * done + [2] * (STEPS - done)
    assert f"resume after step {done}" in {event["name"] for event in check_trace(tmp_path / "run")}
    assert final_state(tmp_path / "run") == final_state(finished)
    made = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run" / "profiles").rglob("*.*")}
    assert made == {f"profiles/step-{step}/{name}-0.json.gz" for step in (2, 3) for name in ("rank", "engine")}
    told = [event for event in events(tmp_path / "run") if event["event"] == "profiled"]
    assert {"profiles/step-3/rank-0.json.gz", "profiles/step-3/engine-0.json.gz"} <= set(told[-1]["files"])
    assert told[-1]["problems"] == {}
    sent = [event for event in events(tmp_path / "run") if event["event"] == "otlp"]
    assert [(event["offered"], event["delivered"]) for event in sent] == [(done, 0), (STEPS - done, 0)]


@unless_drawn("a job that is stopped while it starts")
def test_a_stop_while_starting_is_obeyed_at_once(tmp_path: Path) -> None:
    process = start("run", manifest(tmp_path), "--output", tmp_path / "run")
    wait_for(lambda: (tmp_path / "run" / "logs" / "trainer-0.log").exists(), "a trainer")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, 60)
    assert code == ExitCode.STOPPED, output
    assert "nothing new to save after step 0" in output
    assert [event["event"] for event in events(tmp_path / "run")] == ["start", "stopping", "end"]


def test_a_stop_during_an_evaluation_loses_neither_it_nor_the_step(tmp_path: Path) -> None:
    few = {"name": "few", "synthetic": {"rows": 8, "seed": 5}, "samplesPerPrompt": 2, "passAt": [2], "maxPrompts": 2}
    one = {"name": "one", "synthetic": {"rows": 3}}
    held_out = {"everySteps": 100, "temperature": 1, "sets": [few, one], "atStart": True}
    score = "{'score': sum(map(ord, response)) % 7 / 3, 'long': len(response) > 4, '$': 1}"
    (tmp_path / "my_parts.py").write_text(f"def score(response, **_):\n    return {score}\n")
    job = manifest(
        tmp_path,
        steps=2,
        evaluation=held_out,
        reward={"python": "my_parts:score"},
        environment={"pythonPath": [str(tmp_path)]},
    )
    fault = {"do": "kill", "signal": signal.SIGTERM, "process": "driver", "phase": "rollout_wake_kv", "step": 2}
    code, output = finish(start_faulty(job, tmp_path / "run", fault))
    assert code == ExitCode.STOPPED, output
    at_start, first = read_steps(tmp_path / "run")
    assert (at_start["step"], first["step"], first["index"]) == (0, 1, 1)
    assert any(name.startswith("eval/") for name in at_start["metrics"])
    assert at_start["phases"].keys() == {"eval"}
    assert 0 <= first["metrics"]["rollout/reward_parts/long"] <= 1
    assert first["metrics"]["rollout/reward_parts_left_out"] == 1
    assert [event["names"] for event in events(tmp_path / "run") if event["event"] == "reward_parts_left_out"] == [
        ["$"]
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["executed_steps"]) == (1, 1), "the second is in its checkpoint"
    code, output = run("run", job, "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    last = read_steps(tmp_path / "run")[-1]
    assert (last["step"], last["attempt"], last["recovered"]) == (2, 1, True)
    assert len(read_steps(tmp_path / "run")) == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["executed_steps"] == 2
    evaluated = {name for name in last["metrics"] if name.startswith("eval/")}
    assert evaluated == {
        *("eval/few", "eval/few/truncated_ratio", "eval/few/pass@2"),
        *("eval/one", "eval/one/truncated_ratio", "eval/one/pass@1"),
    }
    _evaluated_again(job, tmp_path / "run", {name: last["metrics"][name] for name in evaluated})


def _evaluated_again(job: Path, run_folder: Path, expected: dict[str, float]) -> None:
    """`rljob eval` gives a checkpoint the scores of its run, to the bit, with engines alone."""
    folder = job.parent / "evaluated"
    code, output = run("eval", job, "--checkpoint", run_folder, "--step", "2", "--output", folder)
    assert code == 0, output
    few, one = json.loads((folder / "evaluation.json").read_text())["sets"]
    assert expected == {
        "eval/few": few["mean"],
        "eval/few/truncated_ratio": few["truncated"],
        "eval/few/pass@2": few["pass_at"]["2"],
        "eval/one": one["mean"],
        "eval/one/truncated_ratio": one["truncated"],
        "eval/one/pass@1": one["pass_at"]["1"],
    }
    assert (few["prompts"], few["responses"], one["prompts"], one["responses"]) == (2, 4, 3, 3)
    assert few["parts"].keys() == {"long", "$"}
    assert {path.stem for path in (folder / "logs").glob("*.log")} == {"engine-0"}
    assert sorted(entry.name for entry in job.parent.iterdir() if "weights" in entry.name) == []
    trajectories = folder / "trajectories" / "step-000000.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(trajectories.read_bytes()).splitlines()]
    assert [row["source"] for row in rows] == ["few"] * 4 + ["one"] * 3
    assert len({row["reward"] for row in rows}) > 1
    assert "Worst and best samples of few" in (folder / "report.html").read_text()
    code, output = run("score", job, "--responses", trajectories)
    assert code == 0, output
    assert "as recorded in the run: 4 of 4" in output


@unless_drawn("a job whose weights lose a bit")
def test_a_bit_flipped_after_landing_is_caught_by_the_probe_and_fails_the_step(tmp_path: Path) -> None:
    faults = [
        {"do": "sleep", "before": "wake_up", "step": 1, "seconds": 0.2},
        {"do": "flip", "phase": "rollout_wake_kv", "step": 2},
    ]
    code, output = finish(start_faulty(manifest(tmp_path), tmp_path / "run", faults))
    assert code == ExitCode.WEIGHT_SYNC, output
    assert "its weights are not what was sent" in output
    (record,) = read_steps(tmp_path / "run")
    assert record["other"] >= 0.2, "time between two phases is in none"


@unless_drawn("a job with its HTTP endpoint")
def test_http_endpoint(tmp_path: Path) -> None:
    # The shortest engine that the prompts allow: the weight probe must fit into it.
    data = {"synthetic": {"rows": 64, "seed": 3}, "maxPromptTokens": 12}
    job = manifest(tmp_path, steps=100000, checkpoint={"everySteps": 100000, "keep": 2}, data=data)
    process = start("run", job, "--output", tmp_path / "run", environment={"RLJOB_DRIVER_TOKEN": "secret"})
    address = json.loads(wait_for(lambda: _text(tmp_path / "run" / "http.json"), "http.json"))
    base = f"http://127.0.0.1:{address['port']}"
    wait_for(lambda: len(_steps(tmp_path / "run")) >= 2, "two steps")
    assert _get(f"{base}/healthz")["ok"]
    assert _get(f"{base}/readyz")["ready"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        _get(f"{base}/v1/status")
    status = _get(f"{base}/v1/status", "secret")
    assert status["ready"]
    assert status["step"] >= 2
    steps = _get(f"{base}/v1/steps?after=0", "secret")["steps"]
    assert steps[0]["index"] == 1
    request = urllib.request.Request(f"{base}/v1/checkpoint", method="POST", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 202
    wait_for(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]")), "checkpoint asked for", 60)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, 60)
    assert code == ExitCode.STOPPED, output
    assert not alive(process.pid)


@unless_drawn("a job with a gradient that is not finite")
def test_non_finite_gradient_is_not_applied(tmp_path: Path) -> None:
    code = "def reward(response, **_):\n    return 1e38 * (sum(map(ord, response)) % 3)\n"
    (tmp_path / "naughty.py").write_text(code)
    job = manifest(
        tmp_path,
        steps=3,
        algorithm={"name": "grpo", "normalizeByStd": False},
        reward={"python": "naughty:reward"},
        environment={"pythonPath": [str(tmp_path)]},
    )
    exit_code, output = run("run", job, "--output", tmp_path / "run")
    assert exit_code == 1, output
    assert "the update was not applied" in output
    (record,) = read_steps(tmp_path / "run")
    assert record["applied"] is False
    assert record["step"] == 1
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@unless_drawn("a job cut by tensors, then by stages")
def test_a_job_runs_tensor_parallel_and_goes_on_pipeline_parallel_within_rounding(tmp_path: Path) -> None:
    training: dict[str, Any] = {"precision": "fp32", "optimizer": {"lr": 1.0e-3, "eps": 1e-6}}
    # Room for one of a step's four groups: the others are handed out as engines become free.
    rollout = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}
    rollout |= {"maxNumSeqs": 4, "assignment": "WhenFree"}
    job = manifest(tmp_path, steps=4, training=training, rollout=rollout)
    folder = tmp_path / "run"
    tensor = ["--set", "spec.training.tensorParallel=2", "--set", "spec.rollout.tensorParallel=2"]
    code, output = run("run", job, "--output", folder, *tensor)
    assert code == 0, output
    shutil.move(folder / "checkpoints" / "step-4", tmp_path / "undisturbed")
    code, output = run("run", job, "--output", folder, "--resume", "--set", "spec.training.pipelineParallel=2")
    assert code == 0, output
    assert "the checkpoint of step 2 was resharded, from 2 trainers: tensor 2, pipeline 1," in output
    assert "within rounding, not bit for bit" in output
    (told,) = [event for event in events(folder) if event["event"] == "resharded"]
    assert (told["restored"], told["attempt"]) == (2, 2)

    records = read_steps(folder)
    assert [(r["step"], r["attempt"]) for r in records] == [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (4, 2)]
    assert all(r["weights"]["verified"] for r in records)
    assert all({"trainer-0", "trainer-1"} <= set(r["busy_seconds"]) for r in records)
    for before, after in zip(records[2:4], records[4:], strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "train/entropy_loss"):
            assert after["metrics"][name] == pytest.approx(before["metrics"][name], rel=1e-5, abs=1e-5), name
    (cursor, same_cursor) = (
        json.loads((path / "driver.json").read_text())["data_cursor"]
        for path in (tmp_path / "undisturbed", folder / "checkpoints" / "step-4")
    )
    assert cursor == same_cursor


def _steps(run_folder: Path) -> list[dict[str, Any]]:
    """Steps so far, of a run that may not have begun to write."""
    return read_steps(run_folder) if (run_folder / "steps.jsonl").exists() else []


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _get(url: str, token: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.loads(answer.read())


@unless_drawn("a job in graph mode")
def test_graph_mode_gives_the_log_probs_of_the_trainer(tmp_path: Path) -> None:
    rollout = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True, "graphMode": True}
    # Else torch compiles and loads a program for each set of instructions, in a new interpreter that imports torch: a
    # third of this test's time.
    known = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "ATEN_CPU_CAPABILITY": "avx2"}
    engine = {"rollout": known if " avx2 " in Path("/proc/cpuinfo").read_text() else {}}
    job = manifest(tmp_path, steps=2, rollout=rollout, environment=engine)
    code, output = run("run", job, "--output", tmp_path / "run")
    assert code == 0, output
    differences = [record["metrics"]["train/train_rollout_logprob_abs_diff"] for record in read_steps(tmp_path / "run")]
    assert len(differences) == 2
    assert max(differences) < 1e-4


@unless_drawn("a job that replays experts")
def test_experts_are_replayed_and_guesses_kept_on_engines_of_one_thread(tmp_path: Path) -> None:
    """Two engines on as many cores: neither vLLM's kernels nor what guesses may take more threads than there are."""
    job = yaml.safe_load((REPOSITORY / "examples" / "router-replay.yaml").read_text())["spec"]
    job["rollout"] |= {"maxResponseTokens": 16, "speculative": {"draftTokens": 3, "minMatch": 1}}
    names = ("model", "data", "reward", "training")
    own = {"profile": "cpu", "devicesPerNode": 2, "threadsPerDevice": 1}
    path = manifest(tmp_path, **{name: job[name] for name in names}, rollout=job["rollout"], resources=own, steps=3)
    code, output = run("run", path, "--output", tmp_path / "run")
    assert code == 0, output
    records = read_steps(tmp_path / "run")[1:]
    assert sum(record["metrics"]["rollout/drafts/accepted"] for record in records) > 0
    for record in records:
        # The engines route in bf16 with other roundings than the trainers.
        assert 0 <= record["metrics"]["train/router_mismatch"] < 0.1
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 0.003
