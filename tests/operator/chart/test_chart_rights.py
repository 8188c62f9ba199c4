"""Rights of the operator and of users: exactly what docs/install.md lists."""

from __future__ import annotations

from typing import Any

import pytest
from helm_chart import MODES, NAMESPACE, of_kind, only, render

Rules = set[tuple[str, str, str, str]]

JOB_RULES: Rules = {
    (group, resource, verb, "")
    for group, resource, verbs in (
        ("rljob.dev", "rljobs", "get list watch delete"),
        ("rljob.dev", "rljobs/status", "patch"),
        ("ray.io", "rayclusters", "get list watch create patch delete"),
        ("", "pods", "get list watch"),
        ("", "secrets", "get create"),
        ("networking.k8s.io", "networkpolicies", "get list watch create patch"),
        ("", "events", "create patch"),
        ("kueue.x-k8s.io", "workloads", "get list watch"),
        ("scheduling.volcano.sh", "podgroups", "get list watch"),
    )
    for verb in verbs.split()
}


def rules(role: dict[str, Any]) -> Rules:
    assert all(set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"} for rule in role["rules"])
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def leader_rules(lease: str) -> Rules:
    return {("coordination.k8s.io", "leases", "create", "")} | {
        ("coordination.k8s.io", "leases", verb, lease) for verb in ("get", "update")
    }


def operator_roles(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    users = ("-viewer", "-editor")
    return [
        role
        for kind in ("ClusterRole", "Role")
        for role in of_kind(objects, kind)
        if not role["metadata"]["name"].endswith(users)
    ]


def test_cluster_wide_rights_are_exactly_these() -> None:
    objects = render()
    cluster, leader = operator_roles(objects)
    assert (cluster["kind"], rules(cluster)) == ("ClusterRole", JOB_RULES)
    assert (leader["kind"], leader["metadata"]["namespace"]) == ("Role", NAMESPACE)
    assert rules(leader) == leader_rules("rljob")


def test_workloads_are_written_only_where_kueue_is_told_what_a_preemption_costs() -> None:
    for namespaces in ([], ["team-a"]):
        objects = render({"watchNamespaces": namespaces, "settings": {"kueuePriorityBoost": True}})
        jobs, _ = operator_roles(objects)
        assert rules(jobs) == JOB_RULES | {("kueue.x-k8s.io", "workloads", "patch", "")}


def test_sandboxes_are_claimed_only_where_the_chart_allows_it() -> None:
    for namespaces in ([], ["team-a"]):
        objects = render({"watchNamespaces": namespaces, "settings": {"sandboxClaims": True}})
        jobs, _ = operator_roles(objects)
        right = {
            ("extensions.agents.x-k8s.io", "sandboxclaims", verb, "") for verb in ["get", "list", "create", "delete"]
        }
        assert rules(jobs) == JOB_RULES | right


def test_namespaced_rights_need_no_cluster_role() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"], "rbac": {"userRoles": False}})
    assert not of_kind(objects, "ClusterRole")
    assert not of_kind(objects, "ClusterRoleBinding")
    by_namespace = {role["metadata"]["namespace"]: rules(role) for role in operator_roles(objects)}
    assert by_namespace == {"team-a": JOB_RULES, "team-b": JOB_RULES, NAMESPACE: leader_rules("rljob")}


def test_rights_meet_when_the_operator_watches_its_own_namespace() -> None:
    roles = operator_roles(render({"watchNamespaces": [NAMESPACE]}))
    assert len({role["metadata"]["name"] for role in roles}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_bindings_lead_from_the_pods_account_to_roles_that_are_there(mode: str) -> None:
    objects = render(MODES[mode])
    account = only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    bindings = of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding")
    roles = {
        (role["kind"], role["metadata"].get("namespace"), role["metadata"]["name"]) for role in operator_roles(objects)
    }
    bound = set()
    for binding in bindings:
        namespace = binding["metadata"].get("namespace")
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        bound.add((binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]))
    assert bound == roles


@pytest.mark.parametrize("mode", MODES)
def test_no_right_has_a_wildcard(mode: str) -> None:
    objects = render(MODES[mode])
    for role in of_kind(objects, "ClusterRole") + of_kind(objects, "Role"):
        for right in rules(role):
            assert not any("*" in part for part in right), (role["metadata"]["name"], right)


def test_users_rights_are_aggregated() -> None:
    roles = {role["metadata"]["name"].rsplit("-", 1)[1]: role for role in of_kind(render(), "ClusterRole")}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"

    def into(name: str) -> set[str]:
        labels = roles[name]["metadata"]["labels"]
        return {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}

    assert into("viewer") == {"view", "edit", "admin"}
    assert into("editor") == {"edit", "admin"}
    assert into("rljob") == set()
    assert {verb for _, _, verb, _ in rules(roles["viewer"])} == {"get", "list", "watch"}
    edited = {(group, resource) for group, resource, _, _ in rules(roles["editor"])}
    assert edited == {("rljob.dev", "rljobs"), ("rljob.dev", "rljobs/scale")}


def test_another_name_renames_the_lease_and_its_right() -> None:
    objects = render({"fullnameOverride": "trainer"})
    leader = next(role for role in operator_roles(objects) if role["kind"] == "Role")
    assert rules(leader) == leader_rules("trainer")
