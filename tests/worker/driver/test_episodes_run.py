"""A job with an environment, from its manifest to its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import KV_CACHE_BYTES, REPOSITORY, manifest, run
from support.samples import unless_drawn

from rljob_api.roles import COMPUTE_VARIABLE
from rljob_worker.records.steps import read_steps
from rljob_worker.records.trajectories import read_trajectories

LAKE = {"name": "FrozenLake", "args": {"size": 3, "instructions": False}, "processes": 1, "perProcess": 16}
SPEC: dict[str, Any] = {
    "steps": 2,
    "data": {"seeds": {"count": 1000}, "applyChatTemplate": True, "environment": LAKE},
    "reward": {"name": "environment"},
    "episodes": {"maxTurns": 3, "maxTokensPerTurn": 2, "maxTokens": 60},
    "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 2},
    "evaluation": {
        "everySteps": 2,
        "data": {"name": "held", "seeds": {"first": 5000, "count": 20}, "applyChatTemplate": True, "environment": LAKE},
    },
    "checkpoint": {"everySteps": 2, "keep": 1},
}


@pytest.mark.slow
@unless_drawn("episodes of two steps")
def test_a_policy_is_trained_on_what_it_said_to_an_environment(tmp_path: Path) -> None:
    code, output = run("run", manifest(tmp_path, **SPEC), "--output", tmp_path / "run")
    assert code == 0, output
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        metrics = record["metrics"]
        assert 1 <= metrics["rollout/episodes/turns/mean"] <= metrics["rollout/episodes/turns/max"] <= 3
        # The trainer reads whole streams, the engine sampled them turn by turn.
        assert metrics["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
        assert record["phases"]["env_wait"] > 0
    assert "eval/held" in records[1]["metrics"]
    _, samples = read_trajectories(tmp_path / "run", 2)
    assert len(samples) == 16
    for sample in samples:
        assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))
        assert sample["response_tokens"] == sum(turn["tokens"] for turn in sample["turns"])
        assert sample["reward_parts"].keys() == {"valid", "success"}
    code, output = run("audit", tmp_path / "run")
    assert (code, "8 trained" in output) == (0, True), output


@pytest.mark.slow
@unless_drawn("episodes of a guide")
def test_the_first_sample_of_rolls_guide_runs_on_a_cpu_with_a_small_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    model = {"random": {"config": {"model_type": "qwen2", **sizes, **heads, "tie_word_embeddings": True}}}
    smaller = {
        "steps": 3, "model": model, "checkpoint.path": str(tmp_path / "runs"), "checkpoint.everySteps": 3,
        "data.environment.processes": 2, "memorySaver.trainMemoryMargin": "64Mi", "storage.volumes": [],
        "resources.trainer.devicesPerNode": 1, "resources.rollout.devicesPerNode": 1, "training.globalBatchSize": 8,
        "rollout.promptsPerStep": 4, "rollout.samplesPerPrompt": 4, "rollout.memoryFraction": None,
        "rollout.kvCacheBytes": KV_CACHE_BYTES, "evaluation.everySteps": 3,
        **{f"evaluation.sets[{number}].seeds.count": 4 for number in range(4)},
    }  # fmt: skip
    given = [f"--set=spec.{field}={json.dumps(value)}" for field, value in smaller.items()]
    example = REPOSITORY / "examples" / "qwen2.5-0.5b-frozen-lake-8xnpu.yaml"
    code, output = run("run", example, *given, "--output", tmp_path / "run", environment={COMPUTE_VARIABLE: "cpu"})
    assert code == 0, output
    records = read_steps(tmp_path / "run")
    assert [record.step for record in records] == [1, 2, 3]
    held_out = {name for name in records[-1].metrics if name.startswith("eval/")}
    sets = {"SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake"}
    assert {f"eval/{name}" for name in sets} <= held_out
