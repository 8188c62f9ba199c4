"""The values' schema: strict, complete, and its refusals name the value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_chart import CHART, MODES, ROOT, helm, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replica": 2}, "replica"),
    ({"replicas": "2"}, "replicas"),
    ({"replicas": -1}, "replicas"),
    ({"watchNamespaces": "team-a"}, "watchNamespaces"),
    ({"watchNamespaces": ["Team_A"]}, "watchNamespaces/0"),
    ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
    ({"image": "rljob-operator:1"}, "image"),
    ({"image": {"repository": ""}}, "image/repository"),
    ({"image": {"repository": "op@sha256:1"}}, "image/repository"),
    ({"image": {"digest": "sha256:123"}}, "image/digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "image/pullPolicy"),
    ({"image": {"registry": "r.example"}}, "registry"),
    ({"imagePullSecrets": ["pull"]}, "imagePullSecrets/0"),
    ({"crd": {"keep": False}}, "keep"),
    ({"rbac": {"create": "yes"}}, "rbac/create"),
    ({"service": {"port": 0}}, "service/port"),
    ({"serviceMonitor": {"enabled": "yes"}}, "serviceMonitor/enabled"),
    ({"serviceMonitor": {"interval": "30"}}, "serviceMonitor/interval"),
    ({"networkPolicy": {"apiServerPorts": []}}, "networkPolicy/apiServerPorts"),
    ({"resources": {"limits": {"memory": True}}}, "resources/limits/memory"),
    ({"nodeSelector": {"infra": True}}, "nodeSelector/infra"),
    ({"extraEnv": [{"value": "x"}]}, "extraEnv/0"),
    ({"extraVolumes": {"a": {}}}, "extraVolumes"),
    ({"commonLabels": {"team": 1}}, "commonLabels/team"),
    ({"global": {"imageRegistry": 5000}}, "global/imageRegistry"),
    ({"policy": {"podFields": ["containers"]}}, "policy/podFields/0"),
    ({"policy": {"hostPaths": ["data"]}}, "policy/hostPaths/0"),
    ({"terminationGracePeriodSeconds": 1}, "terminationGracePeriodSeconds"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    done = helm("template", "rljob", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr.replace(".", "/"), done.stderr
    assert "template:" not in done.stderr, "refused by a failing template, not by the schema"


def test_no_service_account_at_all_is_refused_with_the_remedy() -> None:
    done = helm("template", "rljob", str(CHART), values={"serviceAccount": {"create": False}})
    assert done.returncode != 0
    assert "serviceAccount.name: name the service account that is there" in done.stderr


@pytest.mark.parametrize("settings", [{"leaseSeconds": 5}, {"renewSeconds": 30}, {"retrySeconds": 20}])
def test_lease_times_in_the_wrong_order_are_refused_before_anything_is_installed(settings: dict[str, Any]) -> None:
    done = helm("template", "rljob", str(CHART), values={"settings": settings})
    assert done.returncode != 0
    assert "settings.leaseSeconds" in done.stderr
    assert "must grow in this order" in done.stderr


def objects(entry: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], Any]]:
    yield path, entry, values
    for name, inner in entry.get("properties", {}).items():
        assert name in values, f"values.yaml lacks {path}.{name}"
        yield from objects(inner, values[name], f"{path}.{name}")


def test_schema_and_defaults_have_the_same_values() -> None:
    for path, entry, values in objects(SCHEMA, VALUES):
        if "properties" in entry:
            # A parent chart's `global` holds what its other charts read.
            assert path == ".global" or entry["additionalProperties"] is False, path
            assert set(values) == set(entry["properties"]), path
        assert path == "" or entry["description"].endswith("."), path


@pytest.mark.parametrize("mode", MODES)
def test_values_of_all_modes_pass(mode: str) -> None:
    assert render(MODES[mode])


def test_readme_has_the_present_values() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "helm/chart_readme.py"), "--check"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
