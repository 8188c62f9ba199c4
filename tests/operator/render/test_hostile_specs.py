"""Hostile names, labels and huge strings: valid objects, or a refusal that names the field; never anything else."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from render_cases import BASE, SETTINGS, document, view

from rljob_api.spec import Profile
from rljob_api.validation import ManifestError
from rljob_operator import render
from rljob_operator.render import (
    RenderError,
    check_renderable,
    render_cluster,
    render_policy,
    render_secret,
    submission,
)

# Written from the Kubernetes documentation, apart from the code under test.
DNS = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
DNS_LABEL = re.compile(r"(?=.{1,63}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
VALUE = re.compile(r"((?=.{1,63}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?\Z")
NAME = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")


def assert_key(key: str) -> None:
    prefix, slash, name = key.rpartition("/")
    assert NAME.match(name), key
    assert not slash or DNS.match(prefix), key


def assert_labels(labels: dict[str, str]) -> None:
    for key, value in labels.items():
        assert_key(key)
        assert VALUE.match(value), (key, value)


def assert_pod(template: dict[str, Any]) -> None:
    assert_labels(template["metadata"]["labels"])
    for key in template["metadata"].get("annotations", {}):
        assert_key(key)
    pod = template["spec"]
    assert_labels(pod.get("nodeSelector", {}))
    for field in ("priorityClassName", "runtimeClassName", "serviceAccountName"):
        assert field not in pod or DNS.match(pod[field])
    names = [volume["name"] for volume in pod["volumes"]]
    assert len(set(names)) == len(names)
    for container in pod["containers"]:
        paths = [mount["mountPath"].rstrip("/") for mount in container.get("volumeMounts", [])]
        assert len(set(paths)) == len(paths)
        for mount in container.get("volumeMounts", []):
            assert mount["name"] in names
            assert mount["mountPath"].startswith("/")
            assert ":" not in mount["mountPath"]
        for part in container.get("env", []):
            assert VARIABLE.match(part["name"])
        for key in container["resources"]["limits"]:
            assert_key(key)
    for item in [*pod["containers"], *pod["volumes"]]:
        assert DNS_LABEL.match(item["name"]), item["name"]
    for toleration in pod.get("tolerations", []):
        assert "key" not in toleration or assert_key(toleration["key"]) is None


def assert_valid(job: Any) -> None:
    objects = [render_cluster(job, SETTINGS), render_secret(job, "t"), submission(job, 0, SETTINGS)]
    policy = render_policy(job, SETTINGS)
    if policy is not None:
        objects.append(policy)
    for content in objects:
        assert json.loads(json.dumps(content, allow_nan=False)) == content
        if "metadata" in content and "kind" in content:
            assert DNS_LABEL.match(content["metadata"]["name"])
            assert_labels(content["metadata"]["labels"])
            for key in content["metadata"].get("annotations", {}):
                assert_key(key)
    spec = objects[0]["spec"]
    assert_pod(spec["headGroupSpec"]["template"])
    assert_pod(spec["workerGroupSpecs"][0]["template"])
    for name in spec["workerGroupSpecs"][0]["resources"]:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", name), "it lands in a shell's quotes"


RENDER = Path(render.__file__).parent
MAY_REFUSE = re.compile("_?check_|_check|is_|valid_spec|merge_template|_?merge|_merge_|_strings")


def test_only_checks_refuse() -> None:
    """Builders take what was checked, and cannot fail."""
    found = {}
    for path in RENDER.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                raises = any(isinstance(part, ast.Raise) for part in ast.walk(function))
                found[f"{path.stem}.{function.name}"] = raises
    refusing = [name for name, raises in found.items() if raises]
    assert len(refusing) > 15
    assert [name for name in refusing if not MAY_REFUSE.match(name.partition(".")[2])] == []


HOSTILE = st.one_of(
    st.sampled_from(
        ["", " ", "a", "A.b", "-a", "a" * 64, "a" * 4096, "ä", "a b", "a/b", "a.b/c", "a//b", "/", "..", "/etc/../x",
         "/dev/shm", "/storage", "/x:ro", "'; rm -rf /; '", '"', "$(x)", "\n", "\x00", "💥", "rljob.dev/job", "null",
         "kubernetes.io/arch", "rljob-host-0", "/usr/local/Ascend/driver/", "HCCL_IF_IP", "LD_PRELOAD", "PATH", "=x"]
    ),
    st.text(max_size=20),
)  # fmt: skip
MAP = st.dictionaries(HOSTILE, HOSTILE, max_size=3)
VOLUME = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "rljob-host-0", "storage2"]),
        "mountPath": HOSTILE.map(lambda text: "/" + text),
    },
    optional={"subPath": HOSTILE, "readOnly": st.booleans()},
).flatmap(lambda v: st.sampled_from([{**v, "claim": "c"}, {**v, "hostPath": "/h"}, {**v, "source": {"nfs": {}}}]))
SPEC = {
    "image": HOSTILE,
    "environment": st.fixed_dictionaries(
        {}, optional={"variables": MAP, "trainer": MAP, "rollout": MAP, "secrets": st.lists(HOSTILE, max_size=2)}
    ),
    "pods": st.fixed_dictionaries(
        {},
        optional={
            "labels": MAP,
            "annotations": MAP,
            "serviceAccount": HOSTILE,
            "imagePullSecrets": st.lists(HOSTILE, max_size=2),
            "head": st.fixed_dictionaries(
                {}, optional={"metadata": st.fixed_dictionaries({"labels": MAP}), "spec": MAP}
            ),
            "worker": st.fixed_dictionaries(
                {},
                optional={
                    "spec": st.fixed_dictionaries(
                        {
                            "volumes": st.lists(
                                st.fixed_dictionaries({"name": HOSTILE, "emptyDir": st.just({})}), max_size=2
                            )
                        }
                    )
                },
            ),
        },
    ),
    "scheduling": st.fixed_dictionaries(
        {"system": st.sampled_from(["Kueue", "Volcano", "MindCluster"]), "queue": HOSTILE},
        optional={
            "priorityClass": HOSTILE,
            "nodeSelector": MAP,
            "affinity": st.dictionaries(st.sampled_from(["nodeAffinity", "podAntiAffinity", "x"]), MAP, max_size=2),
            "tolerations": st.lists(
                st.fixed_dictionaries({"key": HOSTILE, "operator": st.just("Equal"), "value": HOSTILE}), max_size=2
            ),
        },
    ),
    "overrides": st.fixed_dictionaries(
        {},
        optional={
            "rayResource": HOSTILE,
            "visibleDevicesAnnotation": HOSTILE,
            "runtimeClass": HOSTILE,
            "nodeSelector": MAP,
            "driverPath": HOSTILE,
            "hostMounts": st.lists(HOSTILE, max_size=3),
            "environment": MAP,
        },
    ),
    "volumes": st.lists(VOLUME, max_size=2),
    "tuning": st.fixed_dictionaries({}, optional={"cpuAffinity": HOSTILE, "compileCachePath": HOSTILE}),
}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    document = yaml.safe_load(BASE)
    spec = document["spec"]
    spec["resources"]["profile"] = draw(st.sampled_from([p.value for p in Profile]))
    for part in draw(st.sets(st.sampled_from(sorted(SPEC)), min_size=1, max_size=2)):
        value = draw(SPEC[part])
        if part in ("overrides", "tuning"):
            spec["resources"][part] = value
        elif part == "volumes":
            spec["storage"]["volumes"] += value
        else:
            spec[part] = value
    return document


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests())
def test_valid_spec_renders_valid_objects_or_names_the_field(document: dict[str, Any]) -> None:
    try:
        job = view(document)
    except ManifestError:
        return  # the API server refuses it too
    problem = check_renderable(job, SETTINGS)
    event("refused" if problem else "rendered")
    if problem:
        field, separator, _ = problem.partition(": ")
        assert separator, problem
        assert re.match(r"spec\.[a-z]\w+", field), problem
        assert len(problem) < 600
        assert problem.isprintable()
        return
    assert_valid(job)


@pytest.mark.parametrize(
    ("settings_", "field"),
    [
        (["pods.labels={'a b': c}"], "spec.pods.labels"),
        ([f"pods.labels={{a: {'x' * 64}}}"], "spec.pods.labels"),
        (["pods.labels={rljob.dev/job: other}"], "spec.pods.labels"),
        (["pods.labels={ray.io/cluster: other}"], "spec.pods.labels"),
        (["pods.annotations={'': x}"], "spec.pods.annotations"),
        ([f"pods.annotations={json.dumps({f'k{i}': 'x' * 4096 for i in range(40)})}"], "spec.pods.annotations"),
        (["pods.serviceAccount=Trainer"], "spec.pods.serviceAccount"),
        (["pods.imagePullSecrets=[ok, 'not ok']"], "spec.pods.imagePullSecrets[1]"),
        (["pods.head={kind: Pod}"], "spec.pods.head"),
        (["pods.head={metadata: {labels: [a]}}"], "spec.pods.head.metadata.labels"),
        (["pods.head={metadata: {annotations: [a]}}"], "spec.pods.head.metadata.annotations"),
        (["pods.head={metadata: {annotations: {a: 5}}}"], "spec.pods.head.metadata.annotations"),
        (["pods.worker={metadata: {labels: {ray.io/x: a}}}"], "spec.pods.worker.metadata.labels"),
        (["pods.worker={spec: null}"], "spec.pods.worker.spec.containers"),
        (["pods.worker={spec: {containers: null}}"], "spec.pods.worker.spec.containers"),
        (
            ["pods.worker={spec: {containers: [{name: ray-worker, $patch: delete}]}}"],
            "spec.pods.worker.spec.containers",
        ),
        (["pods.worker={spec: {containers: [{name: A B}]}}"], "spec.pods.worker.spec.containers"),
        (["pods.worker={spec: {volumes: 5}}"], "spec.pods.worker.spec.volumes"),
        (["environment.variables={'A B': c}"], "spec.environment.variables"),
        (["environment.variables={'A=B': c}"], "spec.environment.variables"),
        (["environment.secrets=[Hub]"], "spec.environment.secrets[0]"),
        (["scheduling={system: Kueue, queue: 'a b'}"], "spec.scheduling.queue"),
        ([f"scheduling={{system: Kueue, queue: {'q' * 64}}}"], "spec.scheduling.queue"),
        (["scheduling.priorityClass=High"], "spec.scheduling.priorityClass"),
        (["scheduling.nodeSelector={a: 'b c'}"], "spec.scheduling.nodeSelector"),
        (["scheduling.affinity={nodes: {}}"], "spec.scheduling.affinity.nodes"),
        (["scheduling.tolerations=[{key: 'a b', operator: Exists}]"], "spec.scheduling.tolerations[0].key"),
        (['resources.overrides.rayResource="N\'PU"'], "spec.resources.overrides.rayResource"),
        (["resources.overrides.resourceName=a..b/c"], "spec.resources.overrides.resourceName"),
        (["resources.overrides.hostMounts=[relative]"], "spec.resources.overrides.hostMounts[0]"),
        (["resources.overrides.hostMounts=[/a, /a/]"], "spec.resources.overrides.hostMounts[1]"),
        (["resources.overrides.hostMounts=['/a:rw']"], "spec.resources.overrides.hostMounts[0]"),
        (["resources.overrides.driverPath=../x"], "spec.resources.overrides.driverPath"),
        (["resources.overrides.runtimeClass=A"], "spec.resources.overrides.runtimeClass"),
        (['resources.overrides.visibleDevicesAnnotation="a\']"'], "spec.resources.overrides.visibleDevicesAnnotation"),
        (["resources.tuning.compileCachePath=x"], "spec.resources.tuning.compileCachePath"),
        (["storage.volumes[0].name=rljob-host-1"], "spec.storage.volumes[0].name"),
        (["storage.volumes[0].mountPath=/dev/shm"], "spec.storage.volumes[0].mountPath"),
        (["storage.volumes[0].mountPath=/usr/local/dcmi/"], "spec.storage.volumes[0].mountPath"),
        (["storage.volumes[0].subPath=../up"], "spec.storage.volumes[0].subPath"),
        (["storage.volumes[0].claim=A"], "spec.storage.volumes[0].claim"),
        (["image='a b'"], "spec.image"),
    ],
)
def test_refused_with_the_field(settings_: list[str], field: str) -> None:
    problem = refusal(document(*settings_))
    assert re.match(re.escape(field) + r"[\[.:]", problem), problem


def refusal(manifest: dict[str, Any]) -> str:
    """The refusal, from reading or from rendering the manifest."""
    try:
        job = view(manifest)
    except ManifestError as error:
        return str(error.problems[0])
    with pytest.raises(RenderError) as refused:
        render_cluster(job, SETTINGS)
    assert check_renderable(job, SETTINGS) == str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["pods", "serviceAccount"], "A" * 253),
        (["image"], "a b" * 1300),
        (["resources", "overrides"], {"hostMounts": ["x" * 4096]}),
        (["pods"], {"head": {"k" * 5000: 1}}),
        (["pods"], {"head": {"spec": {"k" * 5000: {"$patch": "x" * 5000}}}}),
        (["pods"], {"labels": {"k" * 5000: "v" * 4096}}),
        (["scheduling"], {"affinity": {"k" * 5000: 1}}),
        (["environment"], {"variables": {"\n" * 5000: ""}}),
    ],
)
def test_huge_texts_make_short_messages(path: list[str], value: Any) -> None:
    job = yaml.safe_load(BASE)
    block = job["spec"]
    for name in path[:-1]:
        block = block.setdefault(name, {})
    block[path[-1]] = value
    problem = refusal(job)
    assert len(problem) < 400
    assert problem.isprintable()
