"""RLJob manifests for the cluster tests."""

from __future__ import annotations

from typing import Any

from rljob_api.overrides import apply_overrides

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
