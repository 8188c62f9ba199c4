"""Plans against the memory that real jobs report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from jobs import REPOSITORY, finish, start
from support.samples import unless_drawn
from support.step_lines import read_steps

from rljob_api import RLJob
from rljob_api.validation import load_manifest
from rljob_worker.models.config import ModelConfig
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.tables import MemoryPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN = 0.15
RUN_SECONDS = 800
CPU_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU."""
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""15 M parameters."""
SETTINGS = {
    "fp32-two-replicas": ["spec.training.precision=fp32", "spec.resources.devicesPerNode=2"],
    "bf16-tensor-parallel-offloaded": [
        "spec.training.precision=bf16",
        "spec.training.tensorParallel=2",
        "spec.rollout.tensorParallel=2",
        "spec.training.optimizer.hostOffload=true",
    ],
}

DRAWN = {
    "fp32-two-replicas": unless_drawn("a plan held to a job: two replicas"),
    "bf16-tensor-parallel-offloaded": unless_drawn("a plan held to a job: tensor parallel"),
}


@dataclass(frozen=True)
class Case:
    """A job that ran, and what was planned for it."""

    job: RLJob
    plan: MemoryPlan
    record: dict[str, Any]

    def planned(self, phase: str, *components: str) -> int:
        """Bytes of some components of a rank in a phase."""
        row = next(row for row in self.plan.devices[0].phases if row.phase == phase)
        return sum(row.components.get(name, 0) for name in components)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=DRAWN[name]) for name in SETTINGS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One step of each setting. A sequence fills a block of the KV cache, and shares none."""
    folder = tmp_path_factory.mktemp(request.param)
    document = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    spec = document["spec"]
    spec["model"]["random"]["config"] = MODEL
    spec["data"]["synthetic"].update(promptSymbols=62, answerSymbols=8, symbols=100, rows=64)
    spec["rollout"] = {"promptsPerStep": 8, "samplesPerPrompt": 2, "maxResponseTokens": CPU_BLOCK - 64}
    spec["rollout"] |= {"ignoreEos": True, "prefixCaching": False, "kvCacheBytes": 2**28}
    # As in all jobs of the tests: forks of one process, and no thread that waits for one that waits.
    spec["resources"]["threadsPerDevice"] = 1
    # The probe of the weights would use blocks of its own.
    spec["weightSync"] = {"probeEverySteps": 0}
    spec |= {"steps": 1, "records": {"lingerSeconds": 0}, "timeouts": {"startSeconds": 600, "phaseSeconds": 300}}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(document))
    settings = [part for setting in SETTINGS[request.param] for part in ("--set", setting)]
    code, output = finish(start("run", manifest, "--output", folder / "run", *settings), RUN_SECONDS)
    assert code == 0, output
    job = load_manifest(json.loads((folder / "run" / "run.json").read_text())["job"])
    plan = plan_memory(job.spec, ModelConfig.from_hf(folder / "run" / "model"))
    return Case(job, plan, read_steps(folder / "run")[-1])


def test_trainer_state_is_what_the_arena_held(case: Case) -> None:
    for rank in range(case.plan.job.trainers.world_size):
        asleep = case.record["memory"][f"trainer-{rank}"]["sleep"]
        planned = case.planned("wake_up", "weights", "gradients", "optimizer")
        assert asleep["paused"] == pytest.approx(planned, rel=WITHIN)
        kept = case.planned("wake_up", "weights", "optimizer")
        assert asleep["backup"] == pytest.approx(kept, rel=WITHIN)


def test_staging_slots_are_as_large_as_planned(case: Case) -> None:
    planned = case.plan.hosts[0].phases[0].components["staging slots"]
    assert case.record["weights"]["staging_bytes"] == pytest.approx(planned, rel=WITHIN)


def test_weights_are_as_large_as_planned(case: Case) -> None:
    engine = case.plan.engine.weights * case.plan.job.engine_tp
    assert case.record["weights"]["bytes"] == pytest.approx(engine, rel=WITHIN)


def test_kv_cache_pages_that_were_used(case: Case) -> None:
    """All of a step's sequences run at once; each fills one block."""
    released = [
        memory["rollout_sleep"]["released_bytes"]
        for process, memory in case.record["memory"].items()
        if process.startswith("engine")
    ]
    each = case.plan.engine.kv_bytes_per_token * case.plan.job.engine_tp
    samples = case.job.spec.rollout.prompts_per_step * case.job.spec.rollout.samples_per_prompt
    assert sum(released) == pytest.approx(samples * CPU_BLOCK * each, rel=WITHIN)
