"""RLJob manifests for the cluster tests."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from kube import Kube

from rljob_api.overrides import apply_overrides

FINAL = ("Succeeded", "Failed")
SMALL_JOB: dict[str, Any] = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "job"},
    "spec": {
        "steps": 3,
        "image": "registry.example/rljob-worker:test",
        "model": {"random": {"config": {"model_type": "qwen3"}}},
        "data": {"synthetic": {}},
        "reward": {"name": "exact"},
        "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 1},
        "storage": {"volumes": [{"name": "shared", "mountPath": "/shared", "hostPath": "/shared"}]},
        "checkpoint": {"path": "/shared", "everySteps": 1, "graceSeconds": 2},
        "failurePolicy": {"backoffSeconds": 0.1, "maxBackoffSeconds": 0.5},
    },
}


def small_job(namespace: str, name: str = "job", *settings: str) -> dict[str, Any]:
    """Return a job of three short steps with `path=value` settings over it; paths begin below `spec` or with
    `metadata.`."""
    full = [setting if setting.startswith("metadata.") else f"spec.{setting}" for setting in settings]
    job = apply_overrides(SMALL_JOB, full)
    job["metadata"] = {**job["metadata"], "namespace": namespace, "name": name}
    return job


def phase(job: dict[str, Any]) -> str:
    """The phase in a job's status, or an empty string."""
    return str(job.get("status", {}).get("phase", ""))


def wait_phase(kube: Kube, namespace: str, name: str, phases: Collection[str], seconds: float) -> dict[str, Any]:
    """Wait for one of the phases; another end than the one that is waited for is an error at once."""

    def there(job: dict[str, Any]) -> bool:
        now = phase(job)
        assert now in phases or now not in FINAL, f"{now}: {json.dumps(job['status'])[:3000]}"
        return now in phases

    return kube.wait_for("RLJob", namespace, name, there, seconds)
