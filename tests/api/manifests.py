"""Manifests for the tests of the API."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import yaml

from rljob_api.validation import apply_overrides

# The design's example, on the one profile whose device is built.
DESIGN_EXAMPLE = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: qwen3-4b-grpo}
spec:
  steps: 3000
  mode: Colocated                  # Colocated | Disaggregated | Async
  image: registry.example/rljob-worker:0.1.0
  model: {path: /models/Qwen3-4B}  # checkpoint folder or hub id; or {random: {...config...}} for tests
  data: {path: /data/dapo-math-17k.jsonl, promptKey: prompt, labelKey: label, applyChatTemplate: true}
  reward: {name: math}             # built in, or {python: package.module:function}
  algorithm: {name: grpo, clipLow: 0.2, clipHigh: 0.28, kl: {coefficient: 0.0, estimator: low_var}}
  rollout:
    promptsPerStep: 32
    samplesPerPrompt: 8
    maxResponseTokens: 8192
    temperature: 1.0
    tensorParallel: 2
    memoryFraction: 0.35
  training: {backend: Megatron, tensorParallel: 2, globalBatchSize: 256, optimizer: {lr: 1.0e-6}}
  resources: {profile: cpu, nodes: 1, devicesPerNode: 8}
  memorySaver: {mode: preload, trainMemoryMargin: 2Gi}
  hccl: {connectTimeoutSeconds: 7200, deterministic: true}
  checkpoint: {path: /checkpoints, everySteps: 20, keep: 3}
  failurePolicy: {maxRestarts: 3}
  suspend: false
"""
_EXAMPLE = yaml.safe_load(DESIGN_EXAMPLE)


def manifest(*settings: str) -> dict[str, Any]:
    """The example of the design with `path=value` settings over it; paths begin below `spec` or with `metadata.`"""
    full = [setting if setting.startswith("metadata.") else f"spec.{setting}" for setting in settings]
    return apply_overrides(deepcopy(_EXAMPLE), full)
