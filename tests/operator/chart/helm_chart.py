"""Rendering the chart with the real helm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster import programs

from rljob_api import yaml_text

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "rljob"
NAMESPACE = "rljob-system"

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "two replicas": {"replicas": 2},
    "some namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "monitoring": {
        "serviceMonitor": {"enabled": "always", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": "always", "labels": {"release": "prometheus"}},
    },
    "least": {
        "crd": {"install": False},
        "rbac": {"create": False, "userRoles": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "serviceMonitor": {"enabled": "never"},
        "prometheusRule": {"enabled": "never"},
        "dashboards": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "policy": {"admission": False},
    },
    "everything": {
        "global": {"imageRegistry": "mirror.example:5000/"},
        "commonLabels": {"cost": "rl"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/extra", "readOnly": True}],
        "fullnameOverride": "trainer",
        "replicas": 3,
        "watchNamespaces": ["team-a"],
        "image": {
            "repository": "registry.example:5000/ml/rljob-operator",
            "tag": "v7",
            "digest": "sha256:" + "0a" * 32,
        },
        "imagePullSecrets": [{"name": "pull"}],
        "jobs": {"image": "w.example/worker:1", "images": {"cpu": "w.example/cpu@sha256:" + "1b" * 32, "cuda": "c:2"}},
        "policy": {
            "trustedNamespaces": ["platform"],
            "images": ["registry.example/*", 'odd"one\\'],
            "secrets": ["hub", "tracker-*"],
            "serviceAccounts": ["trainer"],
            "priorityClasses": ["research-*"],
            "hostPaths": ["/data/", "/scratch"],
            "volumeTypes": ["nfs"],
            "podFields": ["hostNetwork", "runtimeClassName"],
            "privileged": True,
            "openRay": True,
            "openNetwork": True,
        },
        "crd": {"annotations": {"owner": "platform"}},
        "serviceAccount": {"name": "trainer-sa", "annotations": {"a": "b"}},
        "service": {"port": 9090, "annotations": {"a": "b"}},
        "serviceMonitor": {
            "enabled": True,
            "interval": "1m",
            "scrapeTimeout": "20s",
            "relabelings": [{"action": "labeldrop", "regex": "pod"}],
            "metricRelabelings": [{"action": "drop", "regex": "x", "sourceLabels": ["__name__"]}],
        },
        "prometheusRule": {"enabled": "always"},
        "dashboards": {"annotations": {"grafana_folder": "RL"}},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "apiServerPorts": [443],
        },
        "resources": {"requests": {"cpu": 1, "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"node-role": "infra"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "podLabels": {"team": "rl"},
        "podAnnotations": {"note": "yes"},
    },
}


@cache
def helm_program() -> Path:
    """Return the helm that the cluster tests use; skips where it was not built."""
    wanted = programs.PROGRAMS["helm"]
    if (programs.folder() / wanted.file_name / wanted.name).exists():
        return programs.program("helm")
    pytest.skip("The chart's tests need helm, which `make cluster-programs` builds once.")


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with the values as its last argument, within a minute."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(values or {}))
        file.flush()
        # A helm that was built as a Go module does not know which Kubernetes it was made for.
        command = [str(helm_program()), *arguments, "--kube-version", programs.KUBERNETES, "--values", file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render(
    values: dict[str, Any] | None = None,
    *,
    release: str = "rljob",
    namespace: str = NAMESPACE,
    chart: Path = CHART,
    api_versions: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Return the rendered objects; fails with helm's words, and where a key is there twice."""
    extra = [word for version in api_versions for word in ("--api-versions", version)]
    arguments = ("template", release, str(chart), "--namespace", namespace, *extra)
    documents = [parsed(text) for text in _rendered(arguments, json.dumps(values or {}))]
    return [document for document in documents if document is not None]


@cache
def parsed(text: str) -> Any:
    """One document of the chart; our CRD has more values than a user's manifest may have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(yaml_text, "MAX_VALUES", 100_000)
        return yaml_text.parse_yaml(text)


@cache
def _rendered(arguments: tuple[str, ...], values: str) -> list[str]:
    done = helm(*arguments, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return re.split(r"^---\n", done.stdout, flags=re.MULTILINE)


def copy_of_chart(folder: Path, **files: str) -> Path:
    """Return a copy of the chart with only these files in its folder `files`, by their path there."""
    shutil.copytree(CHART, folder / "rljob", ignore=shutil.ignore_patterns("files"))
    for name, content in {"alerts.yaml": "groups: []\n", **files}.items():
        path = folder / "rljob/files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder / "rljob"


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = of_kind(objects, kind)
    return found
