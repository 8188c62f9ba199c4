"""A whole job with pictures: they are what it learns from, and it is killed, resumed, shown and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import REPOSITORY, final_state, finish, manifest, run, start_faulty
from safetensors.torch import load_file
from support.samples import drawn, unless_drawn
from support.step_lines import read_steps

from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with pictures")]

STEPS = 4
RANKS = 2
LORA = {"rank": 8, "alpha": 16}
WAYS: dict[str, dict[str, Any]] = {
    "Colocated": {},
    "Colocated, adapters": {"lora": LORA},
    "Disaggregated": {"mode": "Disaggregated"},
    "Disaggregated, adapters": {"mode": "Disaggregated", "lora": LORA},
    "Async": {"mode": "Async"},
    "Async, adapters": {"mode": "Async", "lora": LORA},
}
"""Modes with devices of their own at staleness 0, where a run that was killed has the bits of one that was not."""
DRAWN = drawn("pictures", list(WAYS))


@pytest.fixture(scope="module", params=DRAWN)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job(folder: Path, way: str) -> Path:
    """The example's model and data, with rows of two trainers and two updates a step."""
    path = REPOSITORY / "examples" / "vision.yaml"
    spec: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    mode = WAYS[way].get("mode", "Colocated")
    rollout: dict[str, Any] = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}
    resources = spec["resources"] | {"devicesPerNode": RANKS}
    if mode != "Colocated":
        rollout["staleness"] = {"max": 0}
        resources = {"profile": "cpu", "trainer": {"devicesPerNode": RANKS}, "rollout": {"devicesPerNode": 1}}
    adapters = {key: value for key, value in WAYS[way].items() if key == "lora"}
    return manifest(
        folder,
        mode=mode,
        model=spec["model"],
        data=spec["data"] | {"synthetic": spec["data"]["synthetic"] | {"rows": 64}},
        rollout=rollout,
        training=spec["training"] | {"globalBatchSize": 8} | adapters,
        resources=resources,
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def finished(way: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("vision")
    code, output = run("run", job(folder, way), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_engines_and_trainers_see_the_same_at_each_version(finished: Path) -> None:
    records = read_steps(finished)
    assert len(records) == STEPS
    for record in records:
        assert record["weights"]["verified"] is True
        # Features of a version before would be told by this alone: nothing fails.
        assert record["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert record["metrics"]["train/grad_norm"] > 0


def test_pictures_are_shown(finished: Path) -> None:
    _, samples = read_trajectories(finished)
    assert all(len(sample["pictures"]) == 1 for sample in samples)
    code, output = run("samples", finished, "--best", "1")
    assert code == 0, output
    assert "32 x 32 pixels  sha256 " in output
    code, output = run("report", finished)
    assert code == 0, output
    assert 'alt="picture of the prompt" src="data:image/png;base64,iVBOR' in (finished / "report.html").read_text()


def test_killed_and_resumed_it_ends_with_the_same_bits(way: str, finished: Path, tmp_path: Path) -> None:
    fault = {"do": "kill", "process": "trainer-1", "phase": "actor_train", "step": 3}
    code, output = finish(start_faulty(job(tmp_path, way), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", RANKS) == final_state(finished, RANKS)


def test_an_export_has_the_tower_as_it_was(way: str, finished: Path, tmp_path: Path) -> None:
    code, output = run("export", finished, "--step", str(STEPS), "--to", tmp_path / "hf")
    assert code == 0, output
    before, after = load_file(finished / "model/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        trained = "visual." not in name and ("lora" not in WAYS[way] or name.endswith("_proj.weight"))
        assert torch.equal(tensor, before[name]) != trained, name
    assert (tmp_path / "hf/processor_config.json").is_file()
