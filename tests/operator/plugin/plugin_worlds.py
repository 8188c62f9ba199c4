"""Jobs and their surroundings as the operator would see them, for the tests of `explain`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rljob_api.status import RLJobStatus
from rljob_api.validation import load_manifest
from rljob_operator.state.observed import ClusterView, JobView, Observed, PodRole, PodView

NOW = 1_800_000_000.0
NAME = "qwen3-4b-grpo"


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": NAME, "namespace": "rl"},
        "spec": {
            "steps": 300,
            "image": "registry.local/rljob/worker-ascend:0.1.0",
            "model": {"path": "/models/Qwen3-4B"},
            "data": {"path": "/data/math.jsonl", "promptKey": "prompt", "labelKey": "label"},
            "reward": {"name": "math"},
            "rollout": {"promptsPerStep": 32, "samplesPerPrompt": 8, "maxResponseTokens": 1024, "tensorParallel": 2},
            "training": {"tensorParallel": 2},
            "resources": {"profile": "ascend-a2", "nodes": 2, "devicesPerNode": 8},
            **spec,
        },
    }


def job(status: dict[str, Any] | None = None, **spec: Any) -> JobView:
    parsed = load_manifest(manifest(**spec))
    return JobView(
        namespace="rl",
        name=NAME,
        uid="0f3c9a52-6c1e-4a53-9d0b-0d8a3c1f7a11",
        generation=1,
        created=NOW - 600,
        spec=parsed.spec,
        status=RLJobStatus.model_validate({"phase": "Queued"} if status is None else status),
    )


def cluster(**changes: Any) -> ClusterView:
    made = ClusterView(
        name=NAME,
        uid="8b0f8c8e-53a3-4d0c-a0c4-c3b7d8a7e3c5",
        ready=False,
        desired_workers=2,
        created=NOW - 300,
    )
    return replace(made, **changes)


def pod(name: str, **changes: Any) -> PodView:
    role = PodRole.HEAD if "head" in name else PodRole.WORKER
    return replace(PodView(name=f"{NAME}-{name}", uid=name, role=role, phase="Pending", ready=False), **changes)


def ready_pods() -> tuple[PodView, ...]:
    return tuple(
        pod(name, phase="Running", ready=True)
        for name in ("head-4tk2x", "workers-worker-7qv8d", "workers-worker-x2m4p")
    )


def waiting(view: JobView | None = None, **changes: Any) -> Observed:
    """A job whose RayCluster exists and whose pods are to be given."""
    return Observed(**{"job": view or job(), "cluster": cluster(), "secret_exists": True, **changes})


def up(view: JobView | None = None, **changes: Any) -> Observed:
    """A job whose cluster is ready."""
    ready = cluster(ready=True, ready_workers=2, head_pod=f"{NAME}-head-4tk2x")
    return waiting(view or job({"phase": "Starting", "attempt": 0}), cluster=ready, pods=ready_pods(), **changes)
