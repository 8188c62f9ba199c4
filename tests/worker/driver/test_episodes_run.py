"""A job with an environment, from its manifest to its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import manifest, run
from support.samples import unless_drawn

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
