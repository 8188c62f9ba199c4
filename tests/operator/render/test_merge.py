"""Strategic merge of pod templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_cases import SETTINGS, base, head_pod, variables, worker_pod

from rljob_operator.render import RenderError, render_cluster
from rljob_operator.render.merge import merge

POD: dict[str, Any] = {
    "containers": [
        {
            "name": "ray",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
            "ports": [{"containerPort": 1, "name": "one"}],
            "volumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": True}],
            "args": ["a", "b"],
        }
    ],
    "volumes": [{"name": "v", "emptyDir": {}}],
    "nodeSelector": {"a": "1"},
    "tolerations": [{"key": "t"}],
}


@pytest.mark.parametrize(
    ("patch", "path", "expected"),
    [
        ({"nodeSelector": {"b": "2"}}, ["nodeSelector"], {"a": "1", "b": "2"}),
        ({"nodeSelector": {"a": None}}, ["nodeSelector"], {}),
        ({"nodeSelector": {"$patch": "replace", "c": "3"}}, ["nodeSelector"], {"c": "3"}),
        ({"tolerations": [{"key": "u"}]}, ["tolerations"], [{"key": "u"}]),
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]},
            ["volumes"],
            [{"name": "v", "hostPath": {"path": "/x"}}],
        ),
        ({"volumes": [{"name": "v", "$patch": "delete"}]}, ["volumes"], []),
        ({"containers": [{"name": "ray", "args": ["c"]}]}, ["containers", 0, "args"], ["c"]),
        (
            {"containers": [{"name": "ray", "env": [{"name": "B", "value": "2"}, {"name": "C", "value": "3"}]}]},
            ["containers", 0, "env"],
            [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}],
        ),
        (
            {"containers": [{"name": "ray", "env": [{"name": "A", "$patch": "delete"}]}]},
            ["containers", 0, "env"],
            [{"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        ),
        (
            {"containers": [{"name": "ray", "ports": [{"containerPort": 1, "hostPort": 9}, {"containerPort": 2}]}]},
            ["containers", 0, "ports"],
            [{"containerPort": 1, "name": "one", "hostPort": 9}, {"containerPort": 2}],
        ),
        (
            {"containers": [{"name": "ray", "volumeMounts": [{"mountPath": "/v", "readOnly": None, "subPath": "s"}]}]},
            ["containers", 0, "volumeMounts"],
            [{"name": "v", "mountPath": "/v", "subPath": "s"}],
        ),
        (
            {"containers": [{"name": "side", "image": "i", "env": None}]},
            ["containers", 1],
            {"name": "side", "image": "i"},
        ),
        (
            {"containers": [{"name": "ray", "env": None}]},
            ["containers", 0, "ports"],
            [{"containerPort": 1, "name": "one"}],
        ),
        ({"hostAliases": [{"ip": "1.1.1.1"}]}, ["hostAliases"], [{"ip": "1.1.1.1"}]),
        ({"securityContext": {"runAsUser": 0, "fsGroup": None}}, ["securityContext"], {"runAsUser": 0}),
    ],
)
def test_merged(patch: dict[str, Any], path: list[Any], expected: Any) -> None:
    before = copy.deepcopy(POD)
    found = merge(POD, patch, "spec.pods.worker.spec")
    for part in path:
        found = found[part]
    assert found == expected
    assert before == POD


@pytest.mark.parametrize(
    ("patch", "field", "words"),
    [
        ({"containers": "x"}, "spec.pods.worker.spec.containers", "no list"),
        ({"containers": [{"image": "i"}]}, "spec.pods.worker.spec.containers[0]", "has no name"),
        ({"containers": [{"name": 5}]}, "spec.pods.worker.spec.containers[0]", "has no name"),
        ({"containers": ["ray"]}, "spec.pods.worker.spec.containers[0]", "has no name"),
        ({"tolerations": {}}, "spec.pods.worker.spec.tolerations", "no list"),
        ({"nodeSelector": ["a"]}, "spec.pods.worker.spec.nodeSelector", "no mapping"),
        ({"nodeSelector": {"$patch": "merge"}}, "spec.pods.worker.spec.nodeSelector.$patch", "neither delete"),
        (
            {"containers": [{"name": "ray", "ports": [{"containerPort": "1"}]}]},
            "spec.pods.worker.spec.containers[0].ports[0]",
            "has no containerPort",
        ),
    ],
)
def test_other_shapes_are_refused(patch: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RenderError, match=words) as error:
        merge(POD, patch, "spec.pods.worker.spec")
    assert error.value.field == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*POD, "env", "name", "ports", "$patch", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=120)
@given(st.dictionaries(st.sampled_from([*POD, "x"]), JSON, max_size=4))
def test_any_patch_is_merged_or_refused_and_a_merge_is_stable(patch: dict[str, Any]) -> None:
    try:
        once = merge(POD, patch, "spec")
    except RenderError:
        return
    assert None not in once.values()
    if "$patch" not in str(patch):
        assert merge(once, patch, "spec") == once


def test_empty_patch_changes_nothing() -> None:
    assert merge(POD, {}, "spec") == POD


def test_a_label_called_like_a_list_is_a_label() -> None:
    cluster = render_cluster(base("pods.worker={metadata: {labels: {env: prod, ports: '1'}}}"), SETTINGS)
    assert cluster["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]["env"] == "prod"


def test_user_has_the_last_word_on_each_template() -> None:
    cluster = render_cluster(
        base(
            "pods.head={spec: {containers: [{name: ray-head, resources: {limits: {cpu: '1'}}}], priorityClassName: x}}",
            "pods.worker={metadata: {annotations: {a: b}}, spec: {affinity: null, nodeSelector: null,"
            " containers: [{name: ray-worker, env: [{name: TASK_QUEUE_ENABLE, value: '0'}]}]}}",
        ),
        SETTINGS,
    )
    assert head_pod(cluster)["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "32Gi"}
    assert head_pod(cluster)["priorityClassName"] == "x"
    worker = worker_pod(cluster)
    assert "affinity" not in worker
    assert "nodeSelector" not in worker
    assert variables(worker)["TASK_QUEUE_ENABLE"] == "0"
    assert variables(head_pod(cluster))["TASK_QUEUE_ENABLE"] == "2"


def test_labels_that_pods_are_found_by_stay() -> None:
    for override in ("{metadata: null}", "{metadata: {labels: null}}"):
        cluster = render_cluster(base(f"pods.worker={override}"), SETTINGS)
        assert cluster["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]["rljob.dev/job"] == "base"
