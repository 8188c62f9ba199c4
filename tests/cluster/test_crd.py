"""The API server itself: what it refuses, what it accepts, what it fills in, and what may change."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kube import ApiError, Kube
from manifests import manifest
from schema_evaluator import filled_alike
from test_field_rules import ACCEPTED, LOCAL_ONLY, REFUSED, refused_by_api_server, refused_locally
from test_fixed_fields import BEFORE_THE_FIRST_ATTEMPT, ELASTIC, HAS_RUN, MAY_CHANGE, WHILE_SUSPENDED, field_of

from rljob_api.crd import custom_resource_definition
from rljob_api.generate import generated_files
from rljob_api.validation import load_manifest

pytestmark = pytest.mark.cluster
TRIED = "default"
"""Namespace of manifests that are only tried: nothing is stored there."""

# Settings over the design's example -> the field that the API server's message must name.
BAD = {
    "steps=0": "spec.steps",
    "steps=null": "spec.steps",
    "steps='3000'": "spec.steps",
    "steps=2.5": "spec.steps",
    "steps=3000000000": "spec.steps",
    "seed=-1": "spec.seed",
    "mode=Both": "spec.mode",
    "mode=Async": "spec.resources.devicesPerNode",
    "suspend='true'": "spec.suspend",
    "image=''": "spec.image",
    "stepz=1": "spec.stepz",
    "training.tensorParalel=2": "spec.training.tensorParalel",
    "rollout.topP=1.5": "spec.rollout.topP",
    "rollout.temperature=0": "spec.rollout.temperature",
    "rollout.memoryFraction=1": "spec.rollout.memoryFraction",
    "rollout.stop=end": "spec.rollout.stop",
    "rollout.samplesPerPrompt=null": "spec.rollout.samplesPerPrompt",
    "rollout.engineArgs.tensor_parallel_size=4": "spec.rollout.engineArgs.tensor_parallel_size",
    "algorithm.kl.estimator=k9": "spec.algorithm.kl.estimator",
    "algorithm.tis.low=2": "spec.algorithm.tis.low",
    "training.backend=FSDP": "spec.training.tensorParallel",
    "training.tensorParallel=3": "spec.training.tensorParallel",
    "training.globalBatchSize=100": "spec.training.globalBatchSize",
    "training.optimizer.minLr=0.1": "spec.training.optimizer.minLr",
    "training.optimizer.beta2=1": "spec.training.optimizer.beta2",
    "model.random.config={model_type: qwen3}": "spec.model",
    "data.path=null": "spec.data",
    "reward=null": "spec.reward",
    "memorySaver.trainMemoryMargin=2GB": "spec.memorySaver.trainMemoryMargin",
    "records.httpPort=70000": "spec.records.httpPort",
    "timeouts.phases.rolout=5": "spec.timeouts.phases",
    "hccl.useHostIp=true": "spec.hccl.useHostIp",
    "hccl.trainerPorts.host={first: 61000, last: 60000}": "spec.hccl.trainerPorts.host.last",
    "environment.variables.LD_PRELOAD=/lib/x.so": "spec.environment.variables",
    "scheduling.queue=research": "spec.scheduling.queue",
    "scheduling.tolerations=[{value: b}]": "spec.scheduling.tolerations",
    "storage.volumes=[{name: a, mountPath: /a}]": "spec.storage.volumes",
    "failurePolicy.rules=[{action: Stop}]": "spec.failurePolicy.rules",
    "failurePolicy.rules=[{}]": "spec.failurePolicy.rules",
    "failurePolicy.maxRestarts=-1": "spec.failurePolicy.maxRestarts",
    "checkpoint.everySteps=0": "spec.checkpoint.everySteps",
    "metadata.name=qwen3.4b": "metadata.name",
    f"metadata.name={'a' * 48}": "metadata.name",
}


def in_namespace(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}


def refusal(kube: Kube, document: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as error:
        kube.create(in_namespace(document, TRIED), dryRun="All", fieldValidation="Strict")
    assert error.value.code in (400, 422)
    return error.value.message


def test_the_installed_crd_is_the_generated_one(kube: Kube) -> None:
    [text] = [text for name, text in generated_files().items() if name.endswith("rljobs.yaml")]
    assert yaml.safe_load(text) == custom_resource_definition()
    installed = kube.get("CustomResourceDefinition", None, "rljobs.rljob.dev")
    problems = [c for c in installed["status"]["conditions"] if c["type"] == "NonStructuralSchema"]
    assert problems == []


@pytest.mark.parametrize(("setting", "field"), BAD.items(), ids=[key[:60] for key in BAD])
def test_a_bad_manifest_is_refused_by_the_field_s_name(kube: Kube, setting: str, field: str) -> None:
    assert field in refusal(kube, manifest(setting))


def test_every_rule_between_fields_is_told_with_its_message(kube: Kube) -> None:
    wrong = []
    for changes, _ in REFUSED:
        document = manifest(*changes)
        expected = refused_by_api_server(document)
        if not expected:
            assert {message for _, message in refused_locally(document)} <= LOCAL_ONLY, changes
            continue
        said = refusal(kube, document)
        wrong += [(changes, at, message) for at, message in expected if at not in said or message not in said]
    assert wrong == []


def test_good_manifests_are_accepted(kube: Kube) -> None:
    for changes in ACCEPTED:
        kube.create(in_namespace(manifest(*changes), TRIED), dryRun="All", fieldValidation="Strict")


def test_the_defaults_are_those_of_the_types(kube: Kube) -> None:
    for changes in ACCEPTED:
        document = in_namespace(manifest(*changes), TRIED)
        stored = kube.create(document, dryRun="All")["spec"]
        expected = load_manifest(document).spec.model_dump(mode="json", by_alias=True)
        assert filled_alike(without_nulls(stored), without_nulls(expected)), changes
        assert load_manifest({**document, "spec": stored}).spec == load_manifest(document).spec, changes


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("status", "accepted", "refused"),
    [
        ({"phase": "Pending"}, MAY_CHANGE + WHILE_SUSPENDED + BEFORE_THE_FIRST_ATTEMPT, []),
        ({"phase": "Suspended", "attempts": HAS_RUN}, MAY_CHANGE + WHILE_SUSPENDED, BEFORE_THE_FIRST_ATTEMPT),
        ({"phase": "Running", "attempts": HAS_RUN}, MAY_CHANGE, WHILE_SUSPENDED + BEFORE_THE_FIRST_ATTEMPT),
        ({"phase": "Succeeded", "attempts": HAS_RUN}, MAY_CHANGE, WHILE_SUSPENDED + BEFORE_THE_FIRST_ATTEMPT),
    ],
    ids=["pending", "suspended", "running", "succeeded"],
)
def test_what_may_change(
    kube: Kube, namespace: str, status: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    name = kube.apply(in_namespace(manifest(), namespace))["metadata"]["name"]
    kube.patch("RLJob", namespace, name, {"status": status}, "status")
    for change in accepted:
        changed = kube.apply(in_namespace(manifest(change), namespace), dryRun="All")
        assert changed["metadata"]["generation"] == 2, change
    for change in refused:
        field = field_of(change)
        with pytest.raises(ApiError, match=rf"spec\.{field} (spec\.[\w.]+ )*cannot change") as error:
            kube.apply(in_namespace(manifest(change), namespace), dryRun="All")
        assert error.value.code == 422
        assert f"spec.{field}" in error.value.message


def test_nodes_with_engines_are_scaled_within_the_job_s_bounds(kube: Kube, namespace: str) -> None:
    name = kube.apply(in_namespace(manifest(*ELASTIC), namespace))["metadata"]["name"]
    running = {"phase": "Running", "attempts": HAS_RUN, "cluster": {"engineNodes": 1}}
    kube.patch("RLJob", namespace, name, {"status": running}, "status")
    scale = kube.request("GET", kube.path("RLJob", namespace, name, "scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 1)
    kube.patch("RLJob", namespace, name, {"spec": {"replicas": 4}}, "scale")
    assert kube.get("RLJob", namespace, name)["spec"]["resources"]["rollout"]["nodes"] == 4
    with pytest.raises(ApiError, match=r"spec.resources.rollout.nodes: .*outside of its own bounds"):
        kube.patch("RLJob", namespace, name, {"spec": {"replicas": 5}}, "scale")


def test_the_count_of_status_writes_opens_no_way_round_the_rules(kube: Kube, namespace: str) -> None:
    made = kube.create(in_namespace(manifest(), namespace))
    name = made["metadata"]["name"]
    kube.patch("RLJob", namespace, name, {"status": {"phase": "Running", "attempts": HAS_RUN, "writes": 3}}, "status")
    forged = {"spec": {"seed": 77}, "status": {"phase": "Pending", "writes": 4}}
    with pytest.raises(ApiError, match="seed cannot change"):
        kube.patch("RLJob", namespace, name, forged)
    changed = kube.patch("RLJob", namespace, name, forged, "status")
    assert (changed["spec"]["seed"], changed["status"]["phase"]) == (made["spec"]["seed"], "Pending")


def test_status_is_written_only_through_its_subresource(kube: Kube, namespace: str) -> None:
    document = in_namespace(manifest(), namespace)
    made = kube.create({**document, "status": {"phase": "Failed"}})
    assert "status" not in made
    name = made["metadata"]["name"]
    kube.patch("RLJob", namespace, name, {"status": {"phase": "Running", "attempt": 0}}, "status")
    changed = kube.patch("RLJob", namespace, name, {"spec": {"steps": 5}, "status": {"phase": "Failed"}})
    assert changed["status"]["phase"] == "Running"
    assert changed["metadata"]["generation"] == made["metadata"]["generation"] + 1


def test_a_status_that_is_wrong_is_refused(kube: Kube, namespace: str) -> None:
    name = kube.create(in_namespace(manifest(), namespace))["metadata"]["name"]
    for status, field in (({"phase": "Lost"}, "status.phase"), ({"attempt": -1}, "status.attempt")):
        with pytest.raises(ApiError, match=field):
            kube.patch("RLJob", namespace, name, {"status": status}, "status")


def test_the_printed_columns(kube: Kube, namespace: str) -> None:
    name = kube.create(in_namespace(manifest(), namespace))["metadata"]["name"]
    status = {
        "phase": "Running",
        "restarts": 2,
        "progress": {"step": 7, "steps": 3000, "eta": "3h12m", "rewardMean": 0.25, "stepSeconds": 4.5},
    }
    kube.patch("RLJob", namespace, name, {"status": status}, "status")
    table = kube.table("RLJob", namespace)
    row = dict(zip([column["name"] for column in table["columnDefinitions"]], table["rows"][0]["cells"]))
    assert row | {"Age": ""} == row | {
        "Name": name, "Phase": "Running", "Step": 7, "Steps": 3000, "ETA": "3h12m", "Reward": 0.25,
        "Step-Seconds": 4.5, "Restarts": 2, "Age": "",
    }  # fmt: skip
