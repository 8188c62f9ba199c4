"""A whole job whose engines get adapters alone, beside weights that they loaded themselves; killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import REPOSITORY, finish, manifest, run, start_faulty
from support.samples import drawn, unless_drawn
from support.step_lines import read_steps

from rljob_api.validation import load_manifest
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with adapters in its engines")]

STEPS = 4
MODES = ["Disaggregated", "Async"]
DRAWN = drawn("adapters", MODES)


def job(folder: Path, mode: str) -> Path:
    """The example's model on two trainers, with an engine of its own that is never behind."""
    spec: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "lora.yaml").read_text())["spec"]
    spec["model"]["random"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    return manifest(
        folder,
        mode=mode,
        model=spec["model"],
        training=spec["training"] | {"globalBatchSize": 8, "lora": {"rank": 8, "alpha": 16, "handover": "Adapters"}},
        resources={"profile": "cpu", "nodes": 1, "trainer": {"devicesPerNode": 2}, "rollout": {"devicesPerNode": 1}},
        rollout=spec["rollout"] | {"promptsPerStep": 4, "samplesPerPrompt": 4, "staleness": {"max": 0}},
        algorithm={"name": "grpo", "kl": {"coefficient": 0.01}},
        steps=STEPS,
    )


@pytest.mark.parametrize("mode", DRAWN)
def test_engines_sample_with_the_adapters_before_and_after_a_kill(mode: str, tmp_path: Path) -> None:
    fault = {"do": "kill", "process": "engine-0", "phase": "actor_train", "step": 3}
    code, output = finish(start_faulty(job(tmp_path, mode), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    spec = load_manifest(json.loads((tmp_path / "run" / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, tmp_path / "run" / "model"))
    assert plan.handed_over < plan.of_model / 4
    records = read_steps(tmp_path / "run")
    assert {record["step"] for record in records} == set(range(1, STEPS + 1))
    assert len({record["attempt"] for record in records}) == 2
    for record in records:
        assert record["weights"]["verified"] is True
        assert record["weights"]["bytes"] == plan.handed_over
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert "train/lora_change_lost" not in record["metrics"]
    assert records[-1]["metrics"]["train/kl_loss"] > 1e-4, "the adapters have moved"
