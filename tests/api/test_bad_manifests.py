"""Hundreds of manifests that are wrong in one place: each is refused at once, and the place is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from manifests import manifest
from support.clocks import at_once

from rljob_api.validation import ManifestError, load_manifest

BAD: dict[str, list[str | list[str]]] = yaml.load(
    Path(__file__).with_name("bad_manifests.yaml").read_text(), yaml.CSafeLoader
)
CASES = [
    pytest.param(path, [settings] if isinstance(settings, str) else settings, id=f"{path}-{number}")
    for path, cases in BAD.items()
    for number, settings in enumerate(cases)
]


def test_there_are_many() -> None:
    assert len(CASES) > 950


@pytest.mark.parametrize(("path", "settings"), CASES)
def test_the_place_is_named(path: str, settings: list[str]) -> None:
    document = manifest(*settings)
    with at_once(), pytest.raises(ManifestError) as error:
        load_manifest(document)
    named = [problem for problem in error.value.problems if problem.path.startswith(path)]
    assert named, (settings, [str(problem) for problem in error.value.problems])
    assert all(problem.wrong and len(str(problem)) < 2000 for problem in named)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=2147483648", f"spec.steps: {2**31}: is too large; allowed: whole number, at least 1 and at most 21"),
        ("seed=9223372036854775808", f"spec.seed: {2**63}: is too large; allowed: whole number, at least 0 and at"),
        ("pods.worker={spec: {containerz: []}}", "spec.pods.worker.spec.containerz: []: is no field of a pod template, "
         "did you mean containers?"),
        ("environment.variables={'A=B': x}", 'spec.environment.variables[A=B]: "x": is no name of a variable'),
        ("data.split=test", 'spec.data.split: "test": applies to dataset folders and hub ids alone; allowed: leave'),
    ],
)  # fmt: skip
def test_message(setting: str, message: str) -> None:
    with pytest.raises(ManifestError) as error:
        load_manifest(manifest(setting))
    assert [str(problem)[: len(message)] for problem in error.value.problems] == [message]


def test_annotations_are_at_most_what_an_api_server_stores() -> None:
    text = "é" * 2**17
    assert load_manifest(manifest() | {"metadata": {"name": "a", "annotations": {"a": text[:-1]}}})
    with pytest.raises(ManifestError, match=r"metadata\.annotations: .*: are 262145 bytes together; .* most 262144"):
        load_manifest(manifest() | {"metadata": {"name": "a", "annotations": {"a": text}}})


@pytest.mark.parametrize(
    "settings",
    [
        ["pods.worker={spec: {containers: [{name: a, $patch: delete}], hostIPC: true}, metadata: {labels: {a: b}}}"],
        ["pods.head={spec: {volumes: [{name: x, emptyDir: {}}], nodeSelector: null}}"],
        ["image=localhost/worker", "data.name=数据"],
        ["image=host:5000/team/worker:1.0@sha256:abc", "metadata.namespace=team-a"],
        ["environment.variables={HF_HOME: /x, a.b-c: ''}", "data.path=owner/set", "data.split=test"],
        ["model.path=owner/name", "model.revision=main", "model.hub=ModelScope"],
        ["evaluation={data: {path: /a, split: test}, samplesPerPrompt: 4, temperature: 0.6}"],
        ["reward={name: regex, args: {pattern: 'a(b)', compare: true}, onError: Score, errorScore: -1}"],
        ["records={httpPort: 8080, httpHost: '::1'}"],
        ["reward={python: 'scores.async.x:f', writePaths: [/data], readPaths: [/a b/c]}", "checkpoint.path=/data/a"],
        ["pods.worker={spec: {containers: [{name: a, image: b, env: [{name: a.b-c, value: ''}, {name: A}]}]}}"],
        ["pods.worker={spec: {containers: [{name: ray-worker, env: [{$patch: replace}], imagePullPolicy: ''}]}}"],
        ["pods.worker={spec: {containers: [{name: ray-worker, volumeMounts: [{$patch: delete, mountPath: /a}]}]}}"],
        ["pods.worker={spec: {volumes: [{name: a, hostPath: {path: /a, type: ''}}, {name: b, emptyDir: {}}]}}"],
        ["pods.worker={spec: {volumes: [{name: a, projected: {sources: []}}, {name: b, ephemeral: {}, image: null}]}}"],
        ["pods.worker={spec: {affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {}}}}}"],
        ["scheduling.affinity={podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: "
         "[{weight: 1, podAffinityTerm: {topologyKey: a, namespaceSelector: {}, matchLabelKeys: [b]}}]}}"],
        ["scheduling.affinity={nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
         "[{matchFields: [{key: metadata.name, operator: In, values: [a]}], matchExpressions: []}, {}]}}}"],
        ["scheduling.tolerations=[{operator: Exists}, {operator: Exists}]"],
        ["storage.volumes=[{name: a, mountPath: /sys, hostPath: /sys}, {name: b, mountPath: /proc/cpuinfo, hostPath: "
         "/var/lib/lxcfs/cpuinfo}, {name: c, mountPath: /dev, source: {hostPath: {path: /dev, type: null}}}]"],
        ["storage.volumes=[{name: a, mountPath: /a, source: {csi: {driver: d, volumeAttributes: {}}}}]"],
        ["pods.terminationGraceSeconds=20"],
        ["timeouts.phases={reward: 60}", "reward={name: code, args: {kind: Calls, tests: t}}",
         "sandbox={isolation: Service, service: {urls: ['http://a:1/x', 'http://a:1/y'], waitSeconds: 90}}"],
    ],
)  # fmt: skip
def test_what_looks_like_it_and_is_right(settings: list[str]) -> None:
    assert load_manifest(manifest(*settings))


UNUSUAL: list[list[str]] = yaml.safe_load(Path(__file__).with_name("unusual_manifests.yaml").read_text())


@pytest.mark.parametrize("settings", UNUSUAL, ids=range(len(UNUSUAL)))
def test_what_is_unusual_and_right(settings: list[str]) -> None:
    assert load_manifest(manifest(*settings))
