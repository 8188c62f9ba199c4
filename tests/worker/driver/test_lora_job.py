"""A whole job with adapters: two trainers, engines with merged weights, killed, resumed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import REPOSITORY, final_state, finish, manifest, run, start_faulty
from safetensors.torch import load_file, save_file
from support.peft_adapters import PEFT, SCRIPT, needs_peft
from support.samples import unless_drawn
from support.step_lines import read_steps
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script

from rljob_api.spec import LoraSpec
from rljob_api.validation import load_manifest
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.models.adapters import merged, scaled_product
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory
from rljob_worker.trainer.state_file import StateReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with adapters")]

STEPS = 4
RANKS = 2
LORA = {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj", "up_proj"]}


def job(folder: Path, **lora: Any) -> Path:
    """The example's model in bf16 on two trainers, with two updates a step and a reference."""
    spec: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "lora.yaml").read_text())["spec"]
    config = spec["model"]["random"]["config"]
    # With the example's wide start few of so few samples have a reward, and an update may change nothing.
    config |= {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64, "initializer_range": 0.02}
    return manifest(
        folder,
        model=spec["model"],
        training=spec["training"]
        | {"globalBatchSize": 8, "recompute": "Full", "precision": "bf16", "lora": LORA | lora},
        resources=spec["resources"] | {"devicesPerNode": RANKS},
        algorithm={"name": "grpo", "kl": {"coefficient": 0.01}},
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("lora")
    code, output = run("run", job(folder), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_engines_sample_with_the_merged_weights(finished: Path) -> None:
    records = read_steps(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["weights"]["verified"] is True
        # bf16 kernels of two libraries over the same weights.
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 0.02
        assert 0 < record["metrics"]["train/lora_change_lost"] < 1
    assert records[0]["metrics"]["train/kl_loss"] < 1e-3 < records[-1]["metrics"]["train/kl_loss"]


def test_a_rank_holds_what_is_planned(finished: Path) -> None:
    spec = load_manifest(json.loads((finished / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    [awake] = [row.components for row in plan.devices[0].phases if row.phase == "wake_up"]
    for record in read_steps(finished):
        for rank in range(RANKS):
            asleep = record["memory"][f"trainer-{rank}"]["sleep"]
            assert asleep["paused"] == pytest.approx(awake["weights"] + awake["optimizer"], rel=0.05)


def test_killed_and_resumed_it_ends_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    fault = {"do": "kill", "process": "trainer-1", "phase": "actor_train", "step": 3}
    code, output = finish(start_faulty(job(tmp_path), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", RANKS) == final_state(finished, RANKS)


def adapter(finished: Path, name: str) -> torch.Tensor:
    files = (finished / "checkpoints" / f"step-{STEPS}" / f"rank-{rank:05d}.safetensors" for rank in range(RANKS))
    return torch.cat([StateReader(file).read(f"model.{name}") for file in files])


def test_export_has_the_base_and_the_rows_of_both_ranks(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    code, output = run("export", finished, "--step", str(STEPS), "--to", tmp_path / "hf")
    assert code == 0, output
    exported, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", finished / "model"))
    assert exported.keys() == base.keys()
    lora = LoraSpec.model_validate(LORA)
    changed = 0
    for name, tensor in exported.items():
        module, want = name.removesuffix(".weight"), base[name].bfloat16()
        if module.endswith(tuple(LORA["targets"])):
            a, b = (adapter(finished, f"{module}.lora_{which}") for which in "AB")
            want = merged(want, scaled_product(a, b, lora.alpha / lora.rank))
            changed += not torch.equal(tensor, base[name].bfloat16())
        assert torch.equal(tensor, want), name
    assert changed == 6
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), LlamaForCausalLM)
    code, output = run("export", finished, "--adapters", "--step", str(STEPS), "--to", tmp_path / "adapters")
    assert code == 0, output
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    first = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(saved[f"base_model.model.{first}.weight"], adapter(finished, first))


@needs_peft
def test_peft_loads_the_export(finished: Path, tmp_path: Path) -> None:
    for folder, more in (("hf", []), ("adapters", ["--adapters"])):
        code, output = run("export", finished, *more, "--step", str(STEPS), "--to", tmp_path / folder)
        assert code == 0, output
    run_script(TRAINER, SCRIPT, [PEFT, "exported", finished / "model", tmp_path / "adapters", tmp_path / "hf"])


def test_a_base_that_changed_is_no_base(finished: Path, tmp_path: Path) -> None:
    path = finished / "model" / "model.safetensors"
    weights = load_file(path)
    kept = path.read_bytes()
    weights["model.norm.weight"][3] += 1
    save_file(weights, path)
    try:
        code, output = run("export", finished, "--step", str(STEPS), "--to", tmp_path / "hf")
    finally:
        path.write_bytes(kept)
    assert code == ExitCode.USER_ERROR
    assert "other weights" in output
    assert "model.norm.weight differs" in output


def test_a_target_that_matches_nothing_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, output = run("run", job(tmp_path, targets=["q_proj", "qkv_proj"]), "--output", tmp_path / "run")
    assert code == ExitCode.USER_ERROR
    message = 'spec.training.lora.targets[1]: "qkv_proj": is no linear module of the model\'s layers; allowed: q_proj,'
    assert message in " ".join(output.split())
