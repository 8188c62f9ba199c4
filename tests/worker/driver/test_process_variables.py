"""More processes than a machine can run, where its CPU stands for devices."""

from __future__ import annotations

import pytest

from rljob_api import RLJob
from rljob_api.validation import load_manifest
from rljob_worker.cluster.placement import engines_alone
from rljob_worker.driver.preflight import check_processes
from rljob_worker.errors import UserError

GIB = 2**30
MANIFEST = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: many}
spec:
  steps: 1
  mode: Disaggregated
  model: {path: /m}
  data: {path: /a.jsonl}
  reward: {name: math}
  rollout: {promptsPerStep: 2, samplesPerPrompt: 2, maxResponseTokens: 8}
  resources: {profile: cpu, rollout: {devicesPerNode: 32}}
"""


def job(*settings: str) -> RLJob:
    return load_manifest(MANIFEST, list(settings))


def test_both_numbers_are_named() -> None:
    spec = job().spec
    check_processes(spec, cores=3, memory=64 * GIB)
    with pytest.raises(UserError) as error:
        check_processes(spec, cores=2, memory=64 * GIB)
    said = "spec.resources.rollout.devicesPerNode: 1 trainer and 32 engines are 33 processes, for 2 cores; allowed: "
    assert str(error.value) == f"{said}at most 16 on each core, 32"


def test_memory_holds_at_least_the_processes_and_their_caches() -> None:
    spec = job().spec
    with pytest.raises(UserError, match=r"devicesPerNode: 1 trainer and 32 engines take 8\.2 GiB .* has 8\.0 GiB"):
        check_processes(spec, cores=64, memory=8 * GIB)
    spec = job(f"spec.rollout.kvCacheBytes={GIB}").spec
    with pytest.raises(UserError, match=r"spec\.rollout\.kvCacheBytes: .* take 40\.2 GiB at least, .* has 32\.0 GiB"):
        check_processes(spec, cores=64, memory=32 * GIB)
    check_processes(spec, cores=64, memory=48 * GIB)


def test_processes_of_a_judge_on_devices_of_its_own_count() -> None:
    resources = "spec.resources={profile: cpu, devicesPerNode: 16}"
    many = "spec.rollout.promptsPerStep=16"
    judge = "spec.judges=[{name: a, kind: Score, model: {path: /models/score, devicesPerNode: 16}}]"
    spec = job("spec.mode=Colocated", resources, many, "spec.reward={name: judge}", judge).spec
    check_processes(spec, cores=3, memory=12 * GIB)
    with pytest.raises(UserError, match="16 trainers and 16 engines, 16 processes of a judge are 48 processes, for 2"):
        check_processes(spec, cores=2, memory=64 * GIB)
    with pytest.raises(UserError, match=r"16 trainers and 16 engines, 16 processes of a judge take 12\.0 GiB at least"):
        check_processes(spec, cores=3, memory=12 * GIB - 1)
    check_processes(spec, cores=1, memory=4 * GIB, groups=engines_alone(spec))


def test_devices_are_counted_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_COMPUTE_DEVICE", raising=False)
    spec = job("spec.resources={profile: ascend-a2, rollout: {devicesPerNode: 8}}").spec
    check_processes(spec, cores=0, memory=0)
    monkeypatch.setenv("RLJOB_COMPUTE_DEVICE", "cpu")
    with pytest.raises(UserError, match="9 processes, for 0 cores"):
        check_processes(spec, cores=0, memory=0)
