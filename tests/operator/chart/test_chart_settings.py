"""The values reach the operator: its own parser reads what the Deployment's environment says."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from helm_chart import CHART, MODES, NAMESPACE, only, render

from rljob_api.spec import Profile
from rljob_operator.render import SET_LABEL_PREFIXES, JobPolicy
from rljob_operator.settings import Settings, SettingsProblem, parse_settings

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
CHANGED = {
    "logLevel": "DEBUG",
    "concurrency": 3,
    "requests": 2,
    "looksPerSecond": 12.5,
    "resyncSeconds": 450,
    "reconcileSeconds": 45.5,
    "statusSeconds": 11,
    "requestSeconds": 7,
    "askSeconds": 6,
    "rebuildSeconds": 8,
    "rebuildTotalSeconds": 80,
    "optionalKindsSeconds": 99,
    "kueuePriorityBoost": True,
    "sandboxClaims": True,
    "leaseSeconds": 60,
    "renewSeconds": 40,
    "retrySeconds": 5,
}


def environment(values: dict[str, Any]) -> dict[str, str]:
    (container,) = only(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert len({entry["name"] for entry in container["env"]}) == len(container["env"])
    of_pod = {"metadata.name": "pod-1", "status.podIP": "fd00::1"}
    return {
        entry["name"]: of_pod[entry["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in entry else entry["value"]
        for entry in container["env"]
    }


def settings(values: dict[str, Any]) -> Settings:
    return parse_settings([], environment(values))


def snake(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def test_default_values_are_the_operators_own_defaults() -> None:
    given, own = settings({}), Settings()
    chosen_by_the_chart = {"render", "operator_namespace", "lease_name", "identity", "probe_host", "probe_port"}
    for field in fields(Settings):
        if field.name not in chosen_by_the_chart:
            assert getattr(given, field.name) == getattr(own, field.name), field.name
    assert (given.operator_namespace, given.lease_name, given.identity) == (NAMESPACE, "rljob", "pod-1")
    for name in ("worker_image", "worker_images", "kuberay_version", "ray_version"):
        assert getattr(given.render, name) == getattr(own.render, name), name
    assert given.render.operator_namespace == NAMESPACE
    assert given.render.policy == JobPolicy()


def test_every_setting_arrives() -> None:
    assert set(CHANGED) == set(SCHEMA["settings"]["properties"])
    given = settings({"settings": CHANGED})
    assert {name: getattr(given, snake(name)) for name in CHANGED} == CHANGED
    assert not [name for name, value in CHANGED.items() if getattr(Settings(), snake(name)) == value]


def test_what_jobs_get_arrives() -> None:
    images = {"cpu": "r.example/cpu:1", "ascend-a2": "r.example/a2@sha256:" + "ab" * 32}
    jobs = {"image": "r.example/worker:3", "images": images, "kuberayVersion": "v1.6.2", "rayVersion": "2.57.0"}
    jobs["labelPrefixes"] = ["example.com", "team.example.org"]
    render_settings = settings({"jobs": jobs}).render
    assert render_settings.worker_image == "r.example/worker:3"
    assert render_settings.worker_images == images
    assert render_settings.kuberay_version == (1, 6, 2)
    assert render_settings.ray_version == "2.57.0"
    assert render_settings.label_prefixes == ("example.com", "team.example.org")
    prefixes = SCHEMA["jobs"]["properties"]["labelPrefixes"]["items"]["not"]["enum"]
    assert tuple(prefixes) == SET_LABEL_PREFIXES
    assert SCHEMA["jobs"]["properties"]["images"]["propertyNames"]["enum"] == [profile.value for profile in Profile]


def test_the_policy_of_jobs_arrives() -> None:
    policy = {"secrets": ["hub-*"], "podFields": ["hostNetwork"], "privileged": True, "hostPaths": ["/data"]}
    assert settings({"policy": policy}).render.policy == JobPolicy.model_validate(policy)
    assert set(SCHEMA["policy"]["properties"]) - {"admission"} == set(JobPolicy().model_dump(by_alias=True))


def test_watched_namespaces_arrive() -> None:
    assert settings({}).namespaces == ()
    assert settings({"watchNamespaces": ["team-a", "team-b"]}).namespaces == ("team-a", "team-b")


@pytest.mark.parametrize("mode", MODES)
def test_the_jobs_policies_let_in_the_operators_pods(mode: str) -> None:
    template = only(render(MODES[mode]), "Deployment")["spec"]["template"]
    labels = settings(MODES[mode]).render.operator_pod_labels
    assert labels.items() <= template["metadata"]["labels"].items()
    assert len(labels) == 3


@pytest.mark.parametrize("grace", [15, 30, 90])
def test_the_operator_stops_before_it_is_killed(grace: int) -> None:
    values = {"terminationGracePeriodSeconds": grace}
    assert only(render(values), "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == grace
    assert settings(values).stop_seconds == grace - 10


def test_the_ports_are_the_containers() -> None:
    (container,) = only(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [settings({}).http_port, settings({}).probe_port]


def test_lease_times_in_the_wrong_order_end_the_operator_with_a_sentence() -> None:
    with pytest.raises(SettingsProblem, match="must grow in this order"):
        parse_settings([], {**environment({}), "RLJOB_LEASE_SECONDS": "5"})
