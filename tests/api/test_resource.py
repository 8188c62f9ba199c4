"""The RLJob resource: reading, defaults, round trip, status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import DESIGN_EXAMPLE, manifest
from schema_evaluator import admit, filled_alike

from rljob_api import RLJob, RLJobSpec, RLJobStatus
from rljob_api import spec as spec_module
from rljob_api.spec import Profile
from rljob_api.validation import ManifestError, check_runnable_locally, load_manifest


def test_round_trip_of_the_design_example() -> None:
    job = load_manifest(DESIGN_EXAMPLE)
    assert job.spec.training.optimizer.lr == 1e-6
    assert job.spec.resources.profile == spec_module.Profile.CPU
    again = load_manifest(json.loads(job.model_dump_json(by_alias=True, exclude_none=True)))
    assert again == job
    given = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert given == manifest()["spec"]


def test_types_and_api_server_fill_in_the_same_defaults() -> None:
    stored = admit(manifest())["spec"]
    typed = load_manifest(DESIGN_EXAMPLE).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert filled_alike(stored, typed)
    assert not filled_alike({**stored, "seed": 1}, typed)
    assert not filled_alike({name: value for name, value in stored.items() if name != "seed"}, typed)
    assert "pods" not in stored
    assert load_manifest({**manifest(), "spec": stored}).spec == load_manifest(DESIGN_EXAMPLE).spec


def test_file_text_and_document_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(DESIGN_EXAMPLE)
    assert load_manifest(path) == load_manifest(str(path)) == load_manifest(DESIGN_EXAMPLE) == load_manifest(manifest())


def test_a_job_from_the_cluster_is_a_manifest_too() -> None:
    job = load_manifest(
        {
            **manifest(),
            "metadata": {
                "name": "a",
                "namespace": "team",
                "uid": "6d0",
                "resourceVersion": "12",
                "generation": 2,
                "creationTimestamp": "2026-01-31T12:00:00Z",
                "managedFields": [{"manager": "kubectl", "fieldsV1": {}}],
            },
            "status": {
                "phase": "Running",
                "fromANewerOperator": 1,
                "conditions": [
                    {
                        "type": "Running",
                        "status": "True",
                        "reason": "StepsAdvance",
                        "message": "Step 7 of 100.",
                        "lastTransitionTime": "2026-01-31T12:00:00Z",
                    }
                ],
                "progress": {"step": 7, "steps": 100, "lastStep": {"step": 7, "phaseSeconds": {"rollout": 3.5}}},
                "attempts": [{"number": 0, "exitCode": 75, "lastLogLines": ["saved"]}],
            },
        }
    )
    assert job.status is not None
    assert job.status.progress is not None
    assert job.status.progress.last_step is not None
    assert job.status.progress.last_step.phase_seconds == {"rollout": 3.5}
    assert RLJobStatus().model_dump(exclude_none=True, exclude_defaults=True) == {}


def test_one_node_runs_on_this_machine() -> None:
    for profile in Profile:
        check_runnable_locally(load_manifest(manifest(f"resources.profile={profile.value}")))
        with pytest.raises(ManifestError, match=r"spec\.resources\.nodes: 2: this machine is one node"):
            check_runnable_locally(load_manifest(manifest(f"resources.profile={profile.value}", "resources.nodes=2")))


def test_names_of_the_package() -> None:
    assert RLJob.model_fields["spec"].annotation is RLJobSpec
    assert all(hasattr(spec_module, name) for name in spec_module.__all__)


def test_the_types_import_pydantic_alone() -> None:
    code = (
        "import sys, pydantic, yaml; known = set(sys.modules); import rljob_api.generate; import rljob_api.validation;"
        "new = {name.split('.')[0] for name in set(sys.modules) - known} - set(sys.stdlib_module_names);"
        "print(sorted(name for name in new if not name.startswith('_sysconfigdata')))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    names = set(json.loads(out.replace("'", '"')))
    assert names <= {
        "rljob_api",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
    }
