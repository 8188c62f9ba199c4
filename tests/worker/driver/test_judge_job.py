"""A whole job with a judge, by turns or on a device of its own, killed in its phases and resumed to the same bits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import final_state, finish, manifest, run, start_faulty
from support.judge_models import own_scores, write_judge
from support.samples import unless_all, unless_drawn
from support.step_lines import read_steps

from rljob_api.validation import load_manifest
from rljob_worker.data.special_texts import SpecialTexts
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), unless_drawn("a job with a judge")]
WORDS = list("abcdefghijklm")
PROMPT = "{{ prompt }} {{ response }}"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge") / "model", WORDS, template=None)


def job(folder: Path, judge: Path, *, own: int | None = None, **spec: Any) -> Path:
    """With a judge that has so many devices to itself; None: it takes turns."""
    model = {"path": str(judge), "kvCacheBytes": 2**26} | ({} if own is None else {"devicesPerNode": own})
    scorer = {"name": "scorer", "kind": "Score", "model": model, "prompt": PROMPT}
    reward = {"parts": [{"name": "match"}, {"name": "judge", "recordAs": "liked", "weight": 0.1}]}
    return manifest(folder, **{"reward": reward, "judges": [scorer], "steps": 3} | spec)


@pytest.fixture(scope="module")
def finished(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("judged")
    code, output = run("run", job(folder, judge), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_each_step_has_its_turn_and_its_scores_are_the_models(finished: Path, judge: Path) -> None:
    for record in read_steps(finished):
        assert list(record["phases"])[:6] == [
            "rollout", "rollout_sleep", "judge_wake", "judge", "judge_sleep", "reward",
        ]  # fmt: skip
        assert record["memory"]["judge-0"]["judge_sleep"]["resident_bytes"] > 0
        assert record["weights"]["verified"] is True
    rows = [
        json.loads(line)
        for file in sorted((finished / "trajectories").glob("*.jsonl.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(judge)
    special = SpecialTexts(tokenizer)
    texts = [tokenizer(f"{row['prompt']} {special.broken(row['response'])[0]}")["input_ids"] for row in rows]
    assert len(rows) == 3 * 16
    scores = own_scores(judge, texts)
    # No two are alike, so that none can have gone to another sample unseen.
    assert len({round(score, 3) for score in scores}) > 40
    for row, expected in zip(rows, scores, strict=True):
        assert row["reward_parts"]["liked"] == pytest.approx(expected, abs=1e-5)


@unless_drawn("a judge's model: a device of its own")
def test_on_a_device_of_its_own_it_takes_no_turns_and_scores_the_same(
    finished: Path, judge: Path, tmp_path: Path
) -> None:
    """Killed in its phase of the last step, too: the weights are those of the job that was left alone."""
    fault = {"do": "kill", "process": "judge-0", "phase": "judge", "step": 3}
    code, output = finish(start_faulty(job(tmp_path, judge, own=1), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    for record in read_steps(tmp_path / "run"):
        assert list(record["phases"])[:4] == ["rollout", "judge", "reward", "rollout_sleep"]
        assert not {"judge_wake", "judge_sleep"} & set(record["phases"])
    assert final_state(tmp_path / "run") == final_state(finished)
    spec = load_manifest(json.loads((tmp_path / "run" / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    trainer, alone = plan.devices
    assert "judge" not in {row.phase for row in trainer.phases} | {
        name for row in trainer.phases for name in row.components
    }
    weights = (judge / "model.safetensors").stat().st_size
    assert alone.phases[0].components["judge"] == pytest.approx(weights, rel=0.1)
    assert alone.phases[0].components["judge cache"] == 2**26


def test_it_is_planned(finished: Path, judge: Path) -> None:
    spec = load_manifest(json.loads((finished / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    rows = {row.phase: row.components for row in plan.devices[0].phases}
    assert list(rows)[:7] == ["rollout", "reward", "rollout_sleep", "judge_wake", "judge", "judge_sleep", "wake_up"]
    weights = (judge / "model.safetensors").stat().st_size
    assert rows["judge"]["judge"] == pytest.approx(weights, rel=0.1)
    assert rows["judge"]["judge cache"] == 2**26
    assert "judge cache" not in rows["actor_train"]
    # vLLM cannot sleep on cpu.
    assert rows["actor_train"]["judge"] == rows["judge"]["judge"]
    without = plan_memory(
        spec.model_copy(update={"judges": []}), trained_model(spec.training.backend, finished / "model")
    )
    assert plan.hosts[0].peak.total > without.hosts[0].peak.total


@pytest.mark.parametrize(
    ("process", "phase"),
    [
        pytest.param("judge-0", "judge", marks=unless_drawn("a judge's model: killed")),
        *(
            pytest.param(one, phase, marks=unless_all("a kill of each"))
            for one in ("driver", "trainer-0", "engine-0", "judge-0")
            for phase in ("judge_wake", "judge", "judge_sleep")
            if (one, phase) != ("judge-0", "judge")
        ),
    ],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    finished: Path, judge: Path, tmp_path: Path, process: str, phase: str
) -> None:
    fault = {"do": "kill", "process": process, "phase": phase, "step": 3}
    code, output = finish(start_faulty(job(tmp_path, judge), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", 1) == final_state(finished, 1)


@unless_all("jobs of its own")
def test_one_that_writes_is_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """Its answers are random words, in some of which is a verdict."""
    writer = write_judge(tmp_path / "judge", [*WORDS, *"0123456789"], writes=True)
    judge = {
        "name": "writer", "kind": "Chat", "prompt": "{{ response }}", "maxTokens": 64, "temperature": 1.0,
        "model": {"path": str(writer), "kvCacheBytes": 2**26}, "verdict": {"pattern": "([0-9])", "min": 0, "max": 9},
        "maxErrorShare": 1.0,
    }  # fmt: skip
    reward = {"name": "judge", "onError": "Score", "errorScore": -1.0}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        job_of = manifest(tmp_path / name, reward=reward, judges=[judge], steps=3)
        if name == "killed":
            fault = {"do": "kill", "process": "judge-0", "phase": "judge", "step": 3}
            code, output = finish(start_faulty(job_of, tmp_path / name / "run", fault))
            assert code != 0, output
        resume = ["--resume"] if name == "killed" else []
        code, output = run("run", job_of, "--output", tmp_path / name / "run", *resume)
        assert code == 0, output
    states = [final_state(tmp_path / name / "run") for name in ("calm", "killed")]
    assert states[0] == states[1]
    rewards = [
        [sample["reward"] for step in (1, 2, 3) for sample in read_trajectories(tmp_path / name / "run", step)[1]]
        for name in ("calm", "killed")
    ]
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) > 2, "verdicts, and not the score of errors alone"
