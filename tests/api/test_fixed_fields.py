"""Changes allowed after a job was created: they depend on what the job has, which its status says."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import manifest
from schema_evaluator import admit, broken_rules

from rljob_api.rules import MUTABLE_FIELDS, RESUMABLE_FIELDS, immutable_changes
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
WHILE_SUSPENDED = [
    "earlyStop.metric=train/loss",
    "image=other",
    "evaluation.data.path=/data/held-out.jsonl",
    "timeouts.phaseSeconds=60",
    "records.tensorboard=false",
    "scheduling.priorityClass=high",
    "pods.worker={spec: {hostPID: true}}",
    "environment.variables={A: b}",
    "network.hostNetwork=true",
    "weightSync.probeEverySteps=1",
    "storage.sharedMemory=64Gi",
    "resources.head={memory: 64Gi}",
    "resources.worker={memory: 64Gi}",
    "resources.threadsPerDevice=3",
    "memorySaver.releaseProcessGroups=false",
    "memorySaver.trainMemoryMargin=3Gi",
    "hccl.connectTimeoutSeconds=99",
    "hccl.execTimeoutSeconds=99",
    "reward.timeoutSeconds=9",
    "reward.memory=3Gi",
    "reward.onError=Score",
    "reward={name: math, onError: Score, errorScore: -1}",
    "data.skip=[9, dapo-math-17k/10]",
    "rollout.kvCacheBytes=99999999",
    "rollout.memoryFraction=0.25",
    "rollout.maxNumSeqs=9",
    "rollout.maxBatchedTokens=99999",
    "rollout.prefixCaching=false",
    "rollout.graphMode=true",
    "training.maxTokensPerMicroBatch=9999",
    "training.recompute=Selective",
]
BEFORE_THE_FIRST_ATTEMPT = [
    "seed=1",
    "model.path=/models/other",
    "data.path=/data/other.jsonl",
    "reward.name=exact",
    "algorithm.clipLow=0.1",
    "rollout.engineArgs.compilation_config={level: 0}",
    "training.optimizer.lr=1e-5",
    "resources.nodes=2",
    "memorySaver.mode=torch",
    "hccl.deterministic=false",
    "storage.volumes=[{name: a, mountPath: /a, claim: b}]",
    "data.shuffle=false",
    "reward.network=false",
    "rollout.topK=5",
    "training.precision=fp32",
    "checkpoint.path=/elsewhere",
]
HAS_RUN: list[dict[str, Any]] = [{"number": 0}]


def update(
    change: str | list[str], status: dict[str, Any] | None, undo: bool = False, before: list[str] | None = None
) -> list[tuple[str, str]]:
    """Paths and messages of the rules that the change of a job with this status breaks."""
    changes, before = [change] if isinstance(change, str) else change, before or []
    settings = (changes, before) if undo else (before, changes)
    old, new = (admit({**manifest(*given), **({} if status is None else {"status": status})}) for given in settings)
    return [(".".join(map(str, at)), message) for at, message in broken_rules(new, old)]


def field_of(change: str) -> str:
    path = "reward.onError" if "errorScore" in change else change.partition("=")[0]
    whole = [known for known in ("checkpoint.path", *RESUMABLE_FIELDS) if path == known]
    return whole[0] if whole else path.split(".")[0]


@pytest.mark.parametrize("phase", ["Queued", "Running", "Failed", "Suspended"])
@pytest.mark.parametrize("change", MAY_CHANGE)
def test_may_change_at_any_time(change: str, phase: str) -> None:
    assert update(change, {"phase": phase, "attempts": HAS_RUN}) == []
    assert immutable_changes(load_manifest(manifest()).spec, load_manifest(manifest(change)).spec) == []


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("change", WHILE_SUSPENDED)
def test_may_change_while_the_job_holds_no_devices(change: str, undo: bool) -> None:
    field = field_of(change)
    for status in (None, {}, {"phase": "Pending"}, {"phase": "Suspended", "attempts": HAS_RUN}):
        assert update(change, status, undo) == []
    for phase in ("Queued", "Starting", "Running", "Succeeded", "Failed"):
        ((path, message),) = update(change, {"phase": phase}, undo)
        assert path == "spec"
        assert message.startswith(f"spec.{field} ")
        assert " cannot change while the job holds devices: set suspend to true first; " in message
    assert immutable_changes(load_manifest(manifest()).spec, load_manifest(manifest(change)).spec) == []


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("change", BEFORE_THE_FIRST_ATTEMPT)
def test_may_not_change_once_the_job_has_begun(change: str, undo: bool) -> None:
    field = field_of(change)
    for status in (None, {}, {"phase": "Pending"}, {"phase": "Suspended", "attempts": []}):
        assert update(change, status, undo) == []
    for status in ({"phase": "Queued"}, {"phase": "Running"}, {"phase": "Suspended", "attempts": HAS_RUN}):
        ((path, message),) = update(change, status, undo)
        assert path == "spec"
        assert message.startswith(f"spec.{field} cannot change after the job has begun: create another job; ")
        assert message.endswith("allowed at any time: " + ", ".join(MUTABLE_FIELDS))
    assert immutable_changes(load_manifest(manifest()).spec, load_manifest(manifest(change)).spec) == [field]


ELASTIC = [
    "mode=Async",
    "resources={profile: cpu, trainer: {nodes: 1}, rollout: {nodes: 2, devicesPerNode: 8, minNodes: 1, maxNodes: 4}}",
]


@pytest.mark.parametrize("nodes", ["1", "4"])
def test_nodes_with_engines_may_change_within_the_job_s_bounds(nodes: str) -> None:
    change = f"resources.rollout.nodes={nodes}"
    for phase in ("Queued", "Running", "Suspended"):
        assert update([*ELASTIC, change], {"phase": phase, "attempts": HAS_RUN}, before=ELASTIC) == []
    old, new = (load_manifest(manifest(*ELASTIC, *more)).spec for more in ([], [change]))
    assert immutable_changes(old, new) == []


@pytest.mark.parametrize(
    "change",
    [
        "resources.rollout={nodes: 2, devicesPerNode: 8, minNodes: 1, maxNodes: 5}",
        "resources.rollout={nodes: 3, devicesPerNode: 4, minNodes: 1, maxNodes: 4}",
        "resources.rollout={nodes: 2, devicesPerNode: 8}",
        "resources.trainer.nodes=2",
        "resources.tuning.ompNumThreads=2",
    ],
)
def test_nothing_else_of_the_resources_may_change_with_them(change: str) -> None:
    running = {"phase": "Running", "attempts": HAS_RUN}
    for before, after in ((ELASTIC, [*ELASTIC, change]), ([*ELASTIC, change], ELASTIC)):
        ((path, message),) = update(after, running, before=before)
        assert path == "spec"
        assert message.startswith("spec.resources cannot change after the job has begun")
        old, new = (load_manifest(manifest(*changes)).spec for changes in (before, after))
        assert immutable_changes(old, new) == ["resources"]


def test_all_changed_fields_are_named() -> None:
    running = {"phase": "Running", "attempts": HAS_RUN}
    changed = manifest("seed=1", "reward.name=exact", "image=b")
    old, new = (admit({**document, "status": running}) for document in (manifest(), changed))
    messages = [message for _, message in broken_rules(new, old)]
    assert [message.split(" cannot")[0] for message in messages] == ["spec.seed spec.reward", "spec.image"]


def test_a_status_write_breaks_no_rule() -> None:
    old = admit({**manifest(), "status": {"phase": "Running"}})
    assert broken_rules({**old, "status": {"phase": "Failed"}}, old) == []


def test_at_a_status_write_the_blocks_are_not_even_compared() -> None:
    """The specs differ here, as they cannot at the API server, only to tell whether they were looked at."""
    running = {"phase": "Running", "attempts": HAS_RUN}
    old, new = admit({**manifest(), "status": running}), admit(manifest("seed=1"))
    assert broken_rules({**new, "status": {**running, "writes": 0}}, {**old, "status": {**running, "writes": 0}})
    assert broken_rules({**new, "status": {**running, "writes": 1}}, {**old, "status": {**running, "writes": 0}}) == []
    unwritten = {name: value for name, value in old.items() if name != "status"}
    assert broken_rules({**new, "status": {**running, "writes": 1}}, unwritten) == []


def test_every_field_is_tried() -> None:
    tried = {field_of(change) for change in MAY_CHANGE + WHILE_SUSPENDED + BEFORE_THE_FIRST_ATTEMPT}
    fields = {info.alias for info in RLJobSpec.model_fields.values()}
    untried = {"mode", "episodes", "sandbox", "judges", "critic"}
    assert fields - {path.partition(".")[0] for path in tried} == untried, (
        "other modes need other devices, fixed too; episodes need another data source, sandbox and judges a reward, "
        "a critic another algorithm"
    )
    assert {path.partition(".")[0] for path in (*MUTABLE_FIELDS, *RESUMABLE_FIELDS)} <= fields
    # errorScore goes with onError alone.
    assert {field_of(change) for change in WHILE_SUSPENDED} | {"reward.errorScore"} == set(RESUMABLE_FIELDS)
