"""A wrong manifest is wrong at every door: `rljob` and `kubectl rljob`, the operator, the API server."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from render_cases import ROOT, document
from schema_evaluator import admit, broken_rules

from rljob_api.rules.variables import ALLOCATORS, OWNED, SAVER_VARIABLES
from rljob_api.validation import ManifestError, load_manifest
from rljob_operator.shell.caches.stored_spec import read_spec

TORCH = "memorySaver.mode=torch"
IN_CEL = [
    *([f"environment.{place}.{name}=x"] for name in OWNED for place in ("variables", "trainer", "rollout")),
    *([f"resources.overrides.environment.{name}=x"] for name in (*OWNED, *SAVER_VARIABLES)),
    *([f"environment.{place}.{name}=x"] for name in SAVER_VARIABLES for place in ("variables", "trainer")),
    *([f"environment.variables.{name}=x"] for name in ("HCCL_CONNECT_TIMEOUT", "TASK_QUEUE_ENABLE", "ATB_LOG_LEVEL")),
    *([f"environment.{place}.{ALLOCATORS[0]}='expandable_segments:True'"] for place in ("trainer", "rollout")),
    ["environment.variables.PYTORCH_CUDA_ALLOC_CONF='expandable_segments:False'"],
    ["resources.tuning.cpuAffinity='2'"],
    [TORCH, "resources.tuning.taskQueueEnable=2"],
    [TORCH, "environment.trainer.TASK_QUEUE_ENABLE='2'"],
    ["hccl.rolloutPorts.device={first: 1, last: 2}"],
    ["hccl.trainerPorts.host={first: 9000, last: 10002}"],
]
BEYOND_CEL = [
    ["environment.trainer.PATH=''"],
    ["scheduling.system=Kueue"],
    ["scheduling={system: MindCluster, superPodBlock: 16}"],
    ["resources={profile: ascend-950, devicesPerNode: 16}"],
    ["storage.sharedMemory=1000Gi"],
    ["storage.volumes[0].mountPath=/dev/shm"],
    ["pods.labels={ray.io/cluster: other}"],
    ["resources.overrides.hostMounts=[relative]"],
]
ONLY_OF_A_CLUSTER = {
    "check.py": {"_check_files", "_check_image", "_check_sandboxes"},
    "ray_cluster.py": {"valid_spec", "check_ray"},
    "pods.py": {"check_sizes", "_check_memory"},
    "volumes.py": {"check_volumes", "_check", "check_run_folder"},
    "submission.py": {"check_manifest"},
    "policy.py": {"check_policy"},
    "merge.py": {"merge", "_merge_values", "_merge_lists"},
    "overrides.py": {"merge_template", "_strings", "_check_parts"},
    "names.py": {"check_name", "check_labels", "check_label_key", "check_annotations", "check_path", "check_sub_path"},
}
"""Functions that refuse what the manifest alone does not show: the operator's settings, files and volumes that
`rljob run` needs not, and pods as they are once templates are merged."""


@pytest.mark.parametrize("settings", IN_CEL + BEYOND_CEL, ids=" ".join)
def test_every_door_refuses(settings: list[str]) -> None:
    manifest = document(*settings)
    with pytest.raises(ManifestError) as local:
        load_manifest(manifest)
    said = str(local.value)
    stored: Any = {"metadata": manifest["metadata"], "spec": manifest["spec"]}
    with pytest.raises(ManifestError) as operator:
        read_spec(stored)
    assert [str(p) for p in operator.value.problems] == [str(p) for p in local.value.problems], said
    with_cel = {rule for rule in (problem.rule for problem in local.value.problems) if rule}
    broken = {message for _, message in broken_rules(admit(manifest))}
    assert bool(broken) == (settings in IN_CEL), (broken, said)
    assert {message for _, message in with_cel} <= broken


def test_what_only_rendering_refuses_is_listed() -> None:
    """A refusal that the manifest alone shows belongs to `rljob_api.rules`."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "operator/rljob_operator/render").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
                if any(isinstance(e, ast.Call) and getattr(e.func, "id", "") == "RenderError" for e in raised):
                    found.setdefault(path.name, set()).add(function.name)
    assert found == ONLY_OF_A_CLUSTER
