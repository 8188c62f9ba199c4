"""Plans of jobs whose trainers and engines have devices of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from published_models import published

from rljob_api import RLJob
from rljob_api.validation import load_manifest
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.remedies import find_remedies
from rljob_worker.planning.tables import GIB, MemoryTable

MODEL = published("Qwen3-4B")
DISAGGREGATED = "spec.mode=Disaggregated"
SHARED = "spec.resources={profile: ascend-a2, devicesPerNode: 4}"
TOGETHER = "spec.resources={profile: ascend-a2, trainer: {devicesPerNode: 4}, rollout: {devicesPerNode: 4}}"
APART = (
    "spec.resources={profile: ascend-a2, trainer: {nodes: 2, devicesPerNode: 4}, "
    "rollout: {nodes: 3, devicesPerNode: 8, worker: {memory: 100Gi}}}"
)


def job(*overrides: str) -> RLJob:
    document: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "plan"},
        "spec": {
            "steps": 1,
            "model": {"path": "/models/Qwen3-4B"},
            "data": {"path": "/data.jsonl", "maxPromptTokens": 1024},
            "reward": {"name": "math"},
            "algorithm": {"kl": {"coefficient": 0.01}},
            "rollout": {"promptsPerStep": 32, "samplesPerPrompt": 8, "maxResponseTokens": 4096, "memoryFraction": 0.5},
            "training": {"tensorParallel": 2, "recompute": "Full"},
        },
    }
    return load_manifest(document, overrides=list(overrides))


def row(table: MemoryTable, phase: str) -> dict[str, int]:
    return next(row.components for row in table.phases if row.phase == phase)


def test_each_side_has_its_own_part_of_a_shared_device_and_never_sleeps() -> None:
    [shared] = plan_memory(job(SHARED).spec, MODEL).devices
    plan = plan_memory(job(DISAGGREGATED, TOGETHER).spec, MODEL)
    trainers, engines = plan.devices
    for name in ("weights", "gradients", "optimizer", "activations", "logits", "work"):
        assert row(trainers, "actor_train")[name] == row(shared, "actor_train")[name]
    for name in ("engine weights", "KV cache", "engine work"):
        assert row(engines, "rollout")[name] == row(shared, "rollout")[name]
    assert all(phase.components["weights"] for phase in trainers.phases)
    assert all(phase.components["KV cache"] for phase in engines.phases), "it stays while weights land"
    assert not any("engine weights" in phase.components for phase in trainers.phases)
    both = row(shared, "actor_train")
    for name in ("communicators", "runtime"):
        assert row(trainers, "actor_train")[name] + row(engines, "rollout").get(name, 0) == both[name]
    for table in (trainers, engines):
        assert all(phase.components["staging slots"] == both["staging slots"] for phase in table.phases)


def test_trainers_are_those_of_the_trainers_devices() -> None:
    plan = plan_memory(job(DISAGGREGATED, APART).spec, MODEL)
    assert plan.job.trainers.world_size == 8
    assert plan.job.per_node == 4
    assert plan.devices[0].title.startswith("trainers, device: every rank (8)")
    assert plan.devices[1].title == "engines, device: every rank (24)"


def test_each_group_of_nodes_has_a_table_of_host_memory() -> None:
    together = plan_memory(job(DISAGGREGATED, TOGETHER).spec, MODEL)
    assert [host.title for host in together.hosts] == ["host memory of a worker pod (trainers: 4, engines: 4)"]
    plan = plan_memory(job(DISAGGREGATED, APART).spec, MODEL)
    trainers, engines = plan.hosts
    assert trainers.title == "host memory of a worker pod (trainers: 4)"
    assert engines.title == "host memory of a worker pod (engines: 8)"
    assert "reference" in trainers.peak.components
    assert engines.peak.components.keys() == {"processes"}
    assert engines.limit == 100 * GIB
    assert "backup" not in trainers.peak.components, "nobody sleeps"


def test_a_pod_that_is_too_small_is_given_more_by_its_own_field() -> None:
    given = job(DISAGGREGATED, APART.replace("100Gi", "10Gi"))
    replan = partial(plan_memory, model=MODEL)
    plan = replan(given.spec)
    assert not plan.fits
    [change] = [change for change in find_remedies(given, plan, replan).alone if "memory" in change.field]
    assert change.field == "resources.rollout.worker.memory"
    assert replan(job(DISAGGREGATED, APART.replace("100Gi", change.value)).spec).fits


def test_on_the_cpu_both_ends_of_the_network_have_slots() -> None:
    cpu = (
        "spec.resources={profile: cpu, trainer: {nodes: 1, devicesPerNode: 2}, rollout: {nodes: 1, devicesPerNode: 2}}"
    )
    trainers, engines = plan_memory(job(DISAGGREGATED, cpu).spec, MODEL).hosts
    one = trainers.peak.components["staging slots"]
    assert engines.peak.components["staging slots"] == 2 * one, "each engine has its own"
