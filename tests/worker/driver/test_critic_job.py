"""A whole job with a critic: two trainers, one sample a prompt, killed and resumed in each of its phases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import ONE_AND_ONE, REPOSITORY, final_state, finish, manifest, run, start_faulty
from support.samples import unless_all, unless_drawn
from support.step_lines import read_steps

from rljob_api.spec import TrainingBackend
from rljob_api.validation import load_manifest
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with a critic")]

STEPS = 5
RANKS = 2
ROLLOUT = {"promptsPerStep": 16, "samplesPerPrompt": 1, "maxResponseTokens": 4, "ignoreEos": True}
CRITIC = {"warmupSteps": 1, "updatesPerStep": 2, "optimizer": {"lr": 1.0e-3}}


def job(folder: Path, **spec: Any) -> Path:
    """The example's model on two trainers: two updates a step of each model, a reference, and a step of warm-up."""
    example: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "ppo.yaml").read_text())["spec"]
    example["model"]["random"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    return manifest(
        folder,
        **{
            "model": example["model"],
            "rollout": ROLLOUT,
            "training": example["training"] | {"globalBatchSize": 8},
            "resources": example["resources"] | {"devicesPerNode": RANKS},
            "algorithm": {"name": "ppo", "kl": {"coefficient": 0.01}},
            "critic": CRITIC,
            "steps": STEPS,
        }
        | spec,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("critic")
    code, output = run("run", job(folder), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_the_critic_warms_up_and_both_models_learn(finished: Path) -> None:
    first, *others = read_steps(finished)
    assert "actor_train" not in first["phases"]
    assert first["metrics"]["train/loss"] is None
    assert first["metrics"]["critic/explained_variance"] == 0, "its head is 0"
    for record in (first, *others):
        assert {"values", "critic_train"} <= record["phases"].keys()
        assert record["metrics"]["critic/grad_norm"] > 0
        assert record["weights"]["verified"] is True
        assert record["weights"]["version"] == record["step"]
    for record in others:
        assert {"ref_log_probs", "log_probs", "actor_train"} <= record["phases"].keys()
        assert record["metrics"]["train/grad_norm"] > 0
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert record["metrics"]["rollout/rewards"] == pytest.approx(record["metrics"]["rollout/raw_reward"])


def test_a_rank_holds_what_is_planned(finished: Path) -> None:
    check_planned(finished)


def check_planned(finished: Path) -> None:
    spec = load_manifest(json.loads((finished / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    rows = {row.phase: row.components for row in plan.devices[0].phases}
    assert list(rows)[3:8] == ["wake_up", "values", "ref_log_probs", "log_probs", "critic_train"]
    if spec.training.backend is TrainingBackend.FSDP:
        assert rows["critic_train"]["gradients"] > 0
        assert "gradients" not in rows["values"]
    awake = rows["wake_up"]
    both = sum(awake.get(part, 0) for part in ("weights", "gradients", "optimizer", "critic"))
    for record in read_steps(finished):
        for rank in range(RANKS):
            asleep = record["memory"][f"trainer-{rank}"]["sleep"]
            assert asleep["paused"] == pytest.approx(both, rel=0.02)
            if spec.training.backend is TrainingBackend.FSDP:
                assert asleep["paused"] == asleep["backup"]


def test_a_checkpoint_names_the_files_of_both(finished: Path) -> None:
    folder = finished / "checkpoints" / f"step-{STEPS}"
    assert {f"{stem}-0000{rank}.safetensors" for stem in ("rank", "critic") for rank in range(RANKS)} <= {
        path.name for path in folder.iterdir()
    }
    code, output = run("export", finished, "--step", str(STEPS), "--to", finished / "hf")
    assert code == 0, output
    assert (finished / "hf" / "model.safetensors").is_file()


OTHERS = [
    ("trainer-0", "values"),
    ("trainer-1", "actor_train"),
    ("trainer-0", "checkpoint"),
    ("driver", "critic_train"),
]
OTHERS += [("driver", "values"), ("engine-0", "update_weights"), ("trainer-1", "log_probs")]


@pytest.mark.parametrize(
    ("process", "phase"),
    [("trainer-1", "critic_train"), *(pytest.param(*one, marks=unless_all("a kill in each phase")) for one in OTHERS)],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    finished: Path, tmp_path: Path, process: str, phase: str
) -> None:
    fault = {"do": "kill", "process": process, "phase": phase, "step": 4}
    code, output = finish(start_faulty(job(tmp_path), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", RANKS) == final_state(finished, RANKS)
    assert any(name.startswith("critic-00001") for name in final_state(finished, RANKS))


@unless_all("a critic with Megatron")
@pytest.mark.parametrize("sizes", [{"tensorParallel": RANKS}, {"pipelineParallel": RANKS, "precision": "bf16"}])
def test_with_megatron(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Cut over ranks, killed in the critic's phase and resumed."""
    training = {"globalBatchSize": 8, "optimizer": {"lr": 1.0e-3}} | sizes
    states = []
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        path, output = job(tmp_path / name, training=training), tmp_path / name / "run"
        if name == "killed":
            fault = {"do": "kill", "process": "trainer-1", "phase": "critic_train", "step": 4}
            code, text = finish(start_faulty(path, output, fault))
            assert code != 0, text
        code, text = run("run", path, "--output", output, *(["--resume"] if name == "killed" else []))
        assert code == 0, text
        states.append(final_state(output, RANKS))
    assert states[0] == states[1]
    check_planned(tmp_path / "calm" / "run")
    last = read_steps(tmp_path / "calm" / "run")[-1]["metrics"]
    assert last["critic/grad_norm"] > 0
    assert last["train/grad_norm"] > 0


@unless_all("modes with devices of their own")
@pytest.mark.parametrize("mode", ["Disaggregated", "Async"])
def test_devices_of_their_own(mode: str, tmp_path: Path) -> None:
    """Without staleness both modes have the bits of turns on the same device."""
    states = []
    for name, more in (
        ("turns", {"resources": {"profile": "cpu", "threadsPerDevice": 1}}),
        ("apart", {"mode": mode, "resources": ONE_AND_ONE}),
    ):
        (tmp_path / name).mkdir()
        staleness = {"staleness": {"max": 0}} if "mode" in more else {}
        path = job(tmp_path / name, rollout=ROLLOUT | staleness, **more)
        code, output = run("run", path, "--output", tmp_path / name / "run")
        assert code == 0, output
        states.append(final_state(tmp_path / name / "run"))
    assert states[0] == states[1]


@unless_all("a critic beside stale samples")
def test_samples_that_are_older(tmp_path: Path) -> None:
    path = job(tmp_path, mode="Async", resources=ONE_AND_ONE, rollout=ROLLOUT | {"staleness": {"max": 2}})
    code, output = run("run", path, "--output", tmp_path / "run")
    assert code == 0, output
    assert [record["step"] for record in read_steps(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_critic_of_another_tokenizer_is_refused_before_anything_starts(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for folder, expected in ((other, "has another tokenizer than spec.model"), (tmp_path / "none", "critic.model")):
        path = job(tmp_path, critic=CRITIC | {"model": {"path": str(folder)}})
        code, output = run("run", path, "--output", tmp_path / "run")
        assert code == ExitCode.USER_ERROR, output
        assert expected in output
