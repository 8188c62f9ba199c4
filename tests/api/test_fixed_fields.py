"""What may change after a job was created."""

from __future__ import annotations

import pytest
from manifests import manifest
from schema_evaluator import admit, broken_rules

from rljob_api.rules import MUTABLE_FIELDS, immutable_changes
from rljob_api.spec import RLJobSpec
from rljob_api.validation import load_manifest

MAY_CHANGE = [
    "steps=4000",
    "checkpoint.everySteps=5",
    "checkpoint.graceSeconds=60",
    "failurePolicy.maxRestarts=0",
    "failurePolicy.rules=[{exitCodes: [3], action: Fail}]",
    "suspend=true",
    "activeDeadlineSeconds=3600",
    "ttlSecondsAfterFinished=60",
]
MAY_NOT_CHANGE = [
    "seed=1",
    "image=other",
    "model.path=/models/other",
    "data.path=/data/other.jsonl",
    "reward.name=exact",
    "evaluation.data.path=/data/held-out.jsonl",
    "algorithm.clipLow=0.1",
    "rollout.engineArgs.compilation_config={level: 0}",
    "training.optimizer.lr=1e-5",
    "weightSync.probeEverySteps=1",
    "resources.nodes=2",
    "memorySaver.mode=torch",
    "hccl.deterministic=false",
    "scheduling.priorityClass=high",
    "pods.worker={spec: {hostPID: true}}",
    "storage.sharedMemory=64Gi",
    "environment.variables={A: b}",
    "network.hostNetwork=true",
    "timeouts.phaseSeconds=60",
    "records.tensorboard=false",
]


@pytest.mark.parametrize("change", MAY_CHANGE)
def test_may_change(change: str) -> None:
    assert broken_rules(admit(manifest(change)), admit(manifest())) == []
    assert immutable_changes(load_manifest(manifest()).spec, load_manifest(manifest(change)).spec) == []


@pytest.mark.parametrize("change", MAY_NOT_CHANGE)
def test_may_not_change(change: str) -> None:
    field = change.replace("=", ".").split(".")[0]
    for old, new in (([], [change]), ([change], [])):
        broken = broken_rules(admit(manifest(*new)), admit(manifest(*old)))
        assert [at for at, _ in broken] == [("spec", field)]
        assert broken[0][1].startswith(f"{field} cannot change after the job was created; allowed to change: steps, ")
        assert immutable_changes(load_manifest(manifest(*old)).spec, load_manifest(manifest(*new)).spec) == [field]


def test_every_field_is_tried() -> None:
    tried = {change.replace("=", ".").split(".")[0] for change in MAY_CHANGE + MAY_NOT_CHANGE}
    fields = {info.alias for info in RLJobSpec.model_fields.values()}
    assert fields - tried == {"mode"}, "mode has one value that is built"
    assert set(MUTABLE_FIELDS) <= fields
