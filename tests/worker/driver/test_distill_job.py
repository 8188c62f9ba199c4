"""A whole job with a teacher, killed in the teacher's pass and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import final_state, finish, manifest, run, start_faulty
from support.samples import unless_all, unless_drawn
from support.step_lines import read_steps

from rljob_api.validation import load_manifest
from rljob_worker.data.tokenizer import prepare_tokenizer
from rljob_worker.models.random_model import make_random_model
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), unless_drawn("a job with a teacher")]

ROLLOUT = {"promptsPerStep": 16, "samplesPerPrompt": 1, "maxResponseTokens": 4, "ignoreEos": True}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than its policy, with the tokenizer of its data."""
    folder = tmp_path_factory.mktemp("teacher")
    spec = load_manifest(manifest(folder)).spec
    prepare_tokenizer(spec, folder)
    assert spec.model.random is not None
    config = spec.model.random.config | {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    make_random_model(spec.model.random.model_copy(update={"config": config, "seed": 5}), folder, folder)
    return folder


def job(folder: Path, teacher: Path, **spec: Any) -> Path:
    distill = {"teacher": {"path": str(teacher)}, "divergence": "TopK", "topK": 6}
    algorithm = {"name": "distill", "distill": distill, "kl": {"monitor": True}}
    return manifest(folder, **{"algorithm": algorithm, "rollout": ROLLOUT, "steps": 4} | spec)


@pytest.fixture(scope="module")
def finished(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through undisturbed."""
    folder = tmp_path_factory.mktemp("distill")
    code, output = run("run", job(folder, teacher), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_each_step_has_the_teachers_phase_and_its_distance(finished: Path) -> None:
    for record in read_steps(finished):
        assert {"ref_log_probs", "teacher_log_probs", "actor_train"} <= record["phases"].keys()
        assert record["metrics"]["train/teacher_kl"] > 0
        assert record["metrics"]["train/grad_norm"] > 0
        assert record["metrics"]["perf/teacher_log_probs_time"] > 0
        assert record["weights"]["verified"] is True


def test_it_is_planned(finished: Path) -> None:
    spec = load_manifest(json.loads((finished / "run.json").read_text())["job"]).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, finished / "model"))
    rows = {row.phase: row.components for row in plan.devices[0].phases}
    assert list(rows)[3:7] == ["wake_up", "ref_log_probs", "teacher_log_probs", "actor_train"]
    distill = spec.algorithm.distill
    assert distill is not None
    weights = (Path(distill.teacher.path) / "model.safetensors").stat().st_size
    assert rows["teacher_log_probs"]["teacher"] == pytest.approx(weights, rel=0.1)
    assert 0 < rows["actor_train"]["teacher"] < 2**20
    assert "teacher" not in rows["wake_up"]
    assert plan.hosts[0].phases[0].components["teacher"] >= weights * 0.9


@pytest.mark.parametrize(
    "process", ["trainer-0", *(pytest.param(one, marks=unless_all("a kill of each")) for one in ("driver", "engine-0"))]
)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    finished: Path, teacher: Path, tmp_path: Path, process: str
) -> None:
    fault = {"do": "kill", "process": process, "phase": "teacher_log_probs", "step": 3}
    code, output = finish(start_faulty(job(tmp_path, teacher), tmp_path / "run", fault))
    assert code != 0, output
    code, output = run("run", tmp_path / "job.yaml", "--output", tmp_path / "run", "--resume")
    assert code == 0, output
    assert final_state(tmp_path / "run", 1) == final_state(finished, 1)
