"""Jobs for the tests of rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rljob_api.validation import apply_overrides, load_manifest
from rljob_operator.render import RenderSettings
from rljob_operator.state.observed import JobView

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "qwen3-4b-grpo-8x910b1.yaml"
PUBLISHED = {
    "example-8x910b1": EXAMPLE,
    "example-8x910b-torch-mode": EXAMPLES / "qwen3-4b-grpo-8x910b-torch-mode.yaml",
    "example-4xnpu": EXAMPLES / "qwen3-4b-grpo-4xnpu.yaml",
    "example-qwen3.5-4xnpu": EXAMPLES / "qwen3.5-9b-grpo-4xnpu.yaml",
    "example-16xa3": EXAMPLES / "qwen3-8b-rlvr-16xa3.yaml",
    "example-30b-a3b-16xa3": EXAMPLES / "qwen3-30b-a3b-grpo-16xa3.yaml",
    "example-2x8": EXAMPLES / "qwen2.5-7b-rlvr-2x8.yaml",
    "example-2x8-apart": EXAMPLES / "qwen2.5-7b-rlvr-2x8-apart.yaml",
    "example-2x8-halves": EXAMPLES / "qwen2.5-7b-rlvr-2x8-halves.yaml",
    "example-frozen-lake-8xnpu": EXAMPLES / "qwen2.5-0.5b-frozen-lake-8xnpu.yaml",
    "example-fsdp-16xa3": EXAMPLES / "qwen3-8b-rlvr-fsdp-16xa3.yaml",
    "example-30b-a3b-fsdp-8xnpu": EXAMPLES / "qwen3-30b-a3b-fsdp-8xnpu.yaml",
    "example-vl-8b-8xnpu": EXAMPLES / "qwen3-vl-8b-grpo-8xnpu.yaml",
    "example-fsdp-2x8": EXAMPLES / "qwen2.5-7b-rlvr-fsdp-2x8.yaml",
    "example-qwen3.5-8xnpu-async": EXAMPLES / "qwen3.5-9b-grpo-8xnpu-async.yaml",
}
"""Published set-ups (docs/published-setups.md): name of the golden file -> manifest."""
UID = "6d0f7a1e-31c5-4a8e-9b0d-000000000001"
SETTINGS = RenderSettings(
    worker_image="registry.example/rljob-worker:0.1.0", kuberay_version=(1, 6, 2), operator_namespace="rljob-system"
)

BASE = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: base, namespace: team}
spec:
  steps: 10
  model: {path: /storage/model}
  data: {path: /storage/data.jsonl}
  reward: {name: math}
  rollout: {promptsPerStep: 32, samplesPerPrompt: 8, maxResponseTokens: 64, tensorParallel: 2}
  training: {tensorParallel: 2}
  resources: {profile: ascend-a2, nodes: 2, devicesPerNode: 8}
  storage: {volumes: [{name: storage, mountPath: /storage, claim: rl-storage}]}
  checkpoint: {path: /storage/runs}
"""


def document(*settings: str) -> dict[str, Any]:
    """The base manifest with `path=value` settings over it; paths begin below `spec` or with `metadata.`"""
    full = [setting if setting.startswith("metadata.") else f"spec.{setting}" for setting in settings]
    return apply_overrides(yaml.safe_load(BASE), full)


def view(manifest: dict[str, Any] | Path) -> JobView:
    """The operator's view of a job with this manifest."""
    job = load_manifest(manifest)
    return JobView(
        namespace=job.metadata.namespace or "team",
        name=job.metadata.name,
        uid=UID,
        generation=1,
        created=0.0,
        spec=job.spec,
        labels=job.metadata.labels,
    )


def base(*settings: str) -> JobView:
    """The base job with settings over it."""
    return view(document(*settings))


def head_pod(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["spec"]["headGroupSpec"]["template"]["spec"]


def worker_pod(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    """`env` of the Ray container as name -> value or source; each name once."""
    env = pod["containers"][0]["env"]
    found = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in env}
    assert len(found) == len(env), "a variable is there twice"
    return found
