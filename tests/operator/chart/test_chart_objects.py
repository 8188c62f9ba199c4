"""The rendered objects: valid as a set, restricted, and as the values say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, MODES, NAMESPACE, ROOT, copy_of_chart, helm, of_kind, only, parsed, render

CLUSTER_KINDS = {
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
PROMETHEUS = ("monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule")


def matches(labels: dict[str, str], selector: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


@pytest.mark.parametrize("mode", MODES)
def test_lint_finds_nothing(mode: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=MODES[mode])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_every_object_is_in_its_place_and_says_whose_it_is(mode: str) -> None:
    seen = set()
    for item in render(MODES[mode]):
        metadata = item["metadata"]
        identity = (item["kind"], metadata.get("namespace"), metadata["name"])
        assert identity not in seen
        seen.add(identity)
        assert ("namespace" in metadata) == (item["kind"] not in CLUSTER_KINDS), identity
        assert len(metadata["name"]) <= 63
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert metadata["labels"]["helm.sh/chart"] == "rljob-0.1.0"
        assert None not in metadata.values(), identity


@pytest.mark.parametrize("word", ["123", "on", "1e3", "null"])
def test_words_that_yaml_takes_for_something_else_stay_words(word: str) -> None:
    values = {
        "fullnameOverride": word,
        "nameOverride": word,
        "watchNamespaces": [word, "2024"],
        "serviceAccount": {"name": word},
        "priorityClassName": word,
        **{name: {"enabled": "always"} for name in ("serviceMonitor", "prometheusRule")},
    }
    objects = render(values, release=word, namespace=word)
    for item in objects:
        names = [item["metadata"]["name"], item["metadata"].get("namespace", ""), *item["metadata"]["labels"].values()]
        assert all(isinstance(name, str) for name in names), (item["kind"], names)
    assert {role["metadata"]["namespace"] for role in of_kind(objects, "Role")} == {word, "2024"}
    leader = next(role for role in of_kind(objects, "Role") if role["metadata"]["name"].endswith("-leader"))
    assert leader["rules"][1]["resourceNames"] == [word]
    assert {binding["roleRef"]["name"] for binding in of_kind(objects, "RoleBinding")} == {word, f"{word}-leader"}
    assert only(objects, "ServiceMonitor")["spec"]["namespaceSelector"]["matchNames"] == [word]
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == (word, word)
    (labels,) = [v["value"] for v in pod["containers"][0]["env"] if v["name"] == "RLJOB_OPERATOR_POD_LABELS"]
    component, instance, name = (f"app.kubernetes.io/{label}" for label in ("component", "instance", "name"))
    assert sorted(labels.split(",")) == [f"{component}=operator", f"{instance}={word}", f"{name}={word}"]


@pytest.mark.parametrize("mode", MODES)
def test_selectors_find_the_pods(mode: str) -> None:
    objects = render(MODES[mode])
    deployment = only(objects, "Deployment")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    service = only(objects, "Service")
    assert matches(labels, deployment["spec"]["selector"]["matchLabels"])
    assert matches(labels, service["spec"]["selector"])
    for item in of_kind(objects, "NetworkPolicy"):
        assert matches(labels, item["spec"]["podSelector"]["matchLabels"])
    for item in of_kind(objects, "PodDisruptionBudget"):
        assert matches(labels, item["spec"]["selector"]["matchLabels"])
    for item in of_kind(objects, "ServiceMonitor"):
        assert matches(service["metadata"]["labels"], item["spec"]["selector"]["matchLabels"])
        assert item["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
        assert item["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports


def not_restricted(pod: dict[str, Any]) -> list[str]:
    """Requirements of the Pod Security Standard `restricted` (and of a read-only root) that the pod does not meet."""
    shared = pod.get("securityContext", {})
    problems = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    problems += [f"volume {volume['name']}" for volume in pod.get("volumes", ()) if "hostPath" in volume]
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        own = {**shared, **container.get("securityContext", {})}
        wanted = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        problems += [f"{container['name']}: {key}" for key, value in wanted.items() if own.get(key) != value]
        if own.get("privileged") or not own.get("runAsUser"):
            problems.append(f"{container['name']}: runs as root")
    return problems


@pytest.mark.parametrize("mode", MODES)
def test_every_container_is_restricted(mode: str) -> None:
    for item in render(MODES[mode]):
        if "template" in item.get("spec", {}):
            assert not_restricted(item["spec"]["template"]["spec"]) == []


def test_the_check_of_restricted_containers_sees_what_is_wrong() -> None:
    pod = {"hostNetwork": True, "containers": [{"name": "a", "securityContext": {"privileged": True}}]}
    assert len(not_restricted(pod)) == 7


def test_probes_ask_health_and_readiness() -> None:
    (container,) = only(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}


def test_crd_is_the_generated_one_and_outlives_the_chart() -> None:
    rendered = only(render(), "CustomResourceDefinition")
    generated = parsed((ROOT / "crds/rljob.dev_rljobs.yaml").read_text(encoding="utf-8"))
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert rendered["metadata"]["name"] == generated["metadata"]["name"]
    assert rendered["spec"] == generated["spec"]
    assert not (CHART / "crds").exists(), "Helm never upgrades what is in a chart's crds folder"


def test_crd_may_be_left_to_others() -> None:
    assert not of_kind(render({"crd": {"install": False}}), "CustomResourceDefinition")


def test_image_by_tag_and_by_digest() -> None:
    def image(**values: str) -> str:
        objects = render({"image": {"repository": "r.example/op", **values}})
        return only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]

    digest = "sha256:" + "ab" * 32
    assert image() == "r.example/op:0.1.0"
    assert image(tag="v2") == "r.example/op:v2"
    assert image(tag="v2", digest=digest) == f"r.example/op:v2@{digest}"


def test_a_registry_for_all_images_comes_first() -> None:
    values = {"global": {"imageRegistry": "mirror.example/hub/"}, "image": {"repository": "rl/op"}}
    pod = only(render(values), "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "mirror.example/hub/rl/op:0.1.0"


def test_what_an_installation_adds_is_where_it_belongs() -> None:
    objects = render(MODES["everything"])
    assert {item["metadata"]["labels"].get("cost") for item in objects} == {"rl"}
    template = only(objects, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["cost"] == "rl"
    assert "cost" not in only(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    (container,) = template["spec"]["containers"]
    assert container["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    assert container["volumeMounts"] == MODES["everything"]["extraVolumeMounts"]
    assert template["spec"]["volumes"] == MODES["everything"]["extraVolumes"]
    (endpoint,) = only(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"action": "labeldrop", "regex": "pod"}]
    assert endpoint["metricRelabelings"][0]["action"] == "drop"
    assert not of_kind(render({"serviceMonitor": {"enabled": False}}, api_versions=PROMETHEUS), "ServiceMonitor")


def test_openshift_chooses_the_user() -> None:
    none = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    pod = only(render({"podSecurityContext": none}), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_api_servers_ports_include_those_of_cce() -> None:
    rules = only(render(), "NetworkPolicy")["spec"]["egress"]
    assert [443, 5443, 6443] in [[port["port"] for port in rule["ports"]] for rule in rules]


def test_two_replicas_are_spread_and_disrupted_one_at_a_time() -> None:
    assert not of_kind(render(), "PodDisruptionBudget")
    objects = render({"replicas": 2})
    assert only(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    spec = only(objects, "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert matches(spec["template"]["metadata"]["labels"], spread["labelSelector"]["matchLabels"])
    assert not of_kind(render({"replicas": 2, "podDisruptionBudget": {"enabled": False}}), "PodDisruptionBudget")


def test_prometheus_objects_come_where_the_cluster_knows_them() -> None:
    kinds = ("ServiceMonitor", "PrometheusRule")
    objects = render()
    assert not any(of_kind(objects, kind) for kind in kinds)
    objects = render(api_versions=PROMETHEUS)
    assert all(of_kind(objects, kind) for kind in kinds)
    never = {"serviceMonitor": {"enabled": "never"}, "prometheusRule": {"enabled": "never"}}
    objects = render(never, api_versions=PROMETHEUS)
    assert not any(of_kind(objects, kind) for kind in kinds)


def test_alerts_arrive_with_their_own_templates(tmp_path: Path) -> None:
    rule = only(render(MODES["monitoring"]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text(encoding="utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    alert = {"alert": "A", "expr": 'x{a="b"} > 0', "annotations": {"summary": "{{ $labels.rljob }}: {{ $value }}"}}
    groups = {"groups": [{"name": "rljob", "rules": [alert]}]}
    chart = copy_of_chart(tmp_path, **{"alerts.yaml": "# A comment.\n" + yaml.safe_dump(groups)})
    assert only(render(MODES["monitoring"], chart=chart), "PrometheusRule")["spec"] == groups


def test_dashboards_arrive_unchanged_and_none_makes_no_config_map(tmp_path: Path) -> None:
    dashboards = {
        "one.json": json.dumps({"title": "One", "legend": "{{phase}} {{ `x` }}"}, indent=2) + "\n",
        "two.json": json.dumps({"title": "Zwei", "text": "ü '\" \\n"}, ensure_ascii=False),
    }
    some = copy_of_chart(tmp_path / "some", **{f"dashboards/{name}": text for name, text in dashboards.items()})
    config = only(render(chart=some), "ConfigMap")
    assert config["data"] == dashboards
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not of_kind(render({"dashboards": {"enabled": False}}, chart=some), "ConfigMap")
    assert not of_kind(render(chart=copy_of_chart(tmp_path / "none")), "ConfigMap")


def test_network_policy_reaches_the_jobs_heads_and_no_other_pod() -> None:
    def heads(values: dict[str, Any]) -> dict[str, Any]:
        (rule,) = [rule for rule in only(render(values), "NetworkPolicy")["spec"]["egress"] if "to" in rule]
        assert [port["port"] for port in rule["ports"]] == [8265, 8300]
        (peer,) = rule["to"]
        assert peer["podSelector"] == {"matchExpressions": [{"key": "rljob.dev/job", "operator": "Exists"}]}
        return peer["namespaceSelector"]

    assert heads({}) == {}
    assert heads({"watchNamespaces": ["team-a"]}) == {
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]}]
    }
    peers = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    (rule,) = only(render({"networkPolicy": {"metricsFrom": peers}}), "NetworkPolicy")["spec"]["ingress"]
    assert rule == {"ports": [{"port": "http", "protocol": "TCP"}], "from": peers}


def test_releases_of_one_name_in_two_namespaces_share_no_cluster_object() -> None:
    def cluster_names(namespace: str) -> set[tuple[str, str]]:
        objects = render({"crd": {"install": False}}, namespace=namespace)
        return {(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in CLUSTER_KINDS}

    assert not cluster_names("one") & cluster_names("two")


def test_long_release_names_make_valid_names() -> None:
    for item in render({"replicas": 2}, release="a" * 53, namespace="n" * 63):
        if item["kind"] in ("Service", "Deployment", "Role"):
            assert len(item["metadata"]["name"]) <= 63, item["kind"]
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())
