"""A whole job with FSDP: two trainers with rows of a Llama, killed, resumed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import REPOSITORY, final_state, finish, manifest, run, start_faulty
from safetensors.torch import load_file
from support.samples import unless_drawn
from support.step_lines import read_steps

from rljob_api.validation import load_manifest
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory
from rljob_worker.trainer.state_file import StateReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with FSDP")]

STEPS = 4
RANKS = 2


def job(folder: Path) -> Path:
    """The example's model and trainers, with two updates a step and a reference."""
    spec: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "fsdp.yaml").read_text())["spec"]
    spec["model"]["random"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    return manifest(
        folder,
        model=spec["model"],
        training=spec["training"] | {"globalBatchSize": 8, "recompute": "Full"},
        resources=spec["resources"],
        algorithm={"name": "grpo", "kl": {"coefficient": 0.01}},
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("fsdp")
    code, output = run("run", job(folder), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_engines_sample_with_what_the_trainers_have(finished: Path) -> None:
    records = read_steps(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["weights"]["verified"] is True
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert record["metrics"]["train/grad_norm"] > 0


def test_a_rank_holds_what_is_planned(finished: Path) -> None:
    spec = load_manifest(json.loads((finished / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    [awake] = [row.components for row in plan.devices[0].phases if row.phase == "wake_up"]
    for record in read_steps(finished):
        for rank in range(RANKS):
            asleep = record["memory"][f"trainer-{rank}"]["sleep"]
            assert asleep["paused"] == asleep["backup"]
            assert asleep["paused"] == pytest.approx(awake["weights"] + awake["optimizer"], rel=0.02)
        # vLLM fills its vocabulary up to a multiple of 64.
        assert record["weights"]["bytes"] == pytest.approx(plan.engine.weights, rel=0.15)


def test_killed_and_resumed_it_ends_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    fault = {"do": "kill", "process": "trainer-1", "phase": "actor_train", "step": 3}
    code, output = finish(start_faulty(job(tmp_path), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", RANKS) == final_state(finished, RANKS)


def test_export_has_the_rows_of_both_ranks(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    code, output = run("export", finished, "--step", str(STEPS), "--to", tmp_path / "hf")
    assert code == 0, output
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    readers = [
        StateReader(finished / "checkpoints" / f"step-{STEPS}" / f"rank-{rank:05d}.safetensors")
        for rank in range(RANKS)
    ]
    assert {f"model.{name}" for name in exported} <= set(readers[0].names)
    for name, tensor in exported.items():
        assert torch.equal(tensor, torch.cat([reader.read(f"model.{name}") for reader in readers])), name
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), LlamaForCausalLM)
