"""The init container that examines worker pods."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from render_cases import SETTINGS, base

from rljob_api.spec import Profile
from rljob_api.wanted import WANTED_VARIABLE, Wanted
from rljob_operator.render import render_cluster


def pods(*settings: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod specs of head and worker."""
    spec = render_cluster(base(*settings), SETTINGS)["spec"]
    return spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]


def doctor(*settings: str) -> dict[str, Any]:
    found = pods(*settings)[1].get("initContainers", [])
    assert [container["name"] for container in found] == ["rljob-doctor"]
    return dict(found[0])


def wanted(container: dict[str, Any]) -> Wanted:
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    # What the kubelet makes of it.
    return Wanted.model_validate_json(str(values[WANTED_VARIABLE]).replace("$$(", "$("))


@pytest.mark.parametrize("profile", Profile)
def test_worker_pods_with_devices_are_examined(profile: Profile) -> None:
    head, worker = pods(f"resources.profile={profile.value}")
    assert "initContainers" not in head
    assert ("initContainers" in worker) is (profile is not Profile.CPU)


@pytest.mark.parametrize("setting", ["pods.doctor=Skip", "environment.variables={RLJOB_COMPUTE_DEVICE: cpu}"])
def test_nobody_is_examined_who_does_not_want_it(setting: str) -> None:
    assert "initContainers" not in pods(setting)[1]


def test_it_sees_what_ray_sees() -> None:
    container, ray = doctor(), pods()[1]["containers"][0]
    for same in ("image", "imagePullPolicy", "volumeMounts", "securityContext", "resources"):
        assert container[same] == ray[same], same
    assert container["env"][:-1] == ray["env"]
    assert not [key for key in container if key.endswith("Probe")]
    found = wanted(container)
    assert (found.profile, found.nodes, found.devices, found.memory_fraction) == (Profile.ASCEND_A2, 2, 8, 0.5)
    assert (found.model, found.runs) == ("/storage/model", "/storage/runs")
    assert found.trainer["LD_PRELOAD"].endswith("torch_memory_saver_hook_mode_preload.abi3.so")
    # In the container's own environment the hook would end its shell, which has no CANN on its library path yet.
    assert "LD_PRELOAD" not in {entry["name"] for entry in container["env"]}


@pytest.mark.parametrize(
    ("setting", "devices"), [("scheduling={system: MindCluster, queue: q}", 8), ("resources.profile=hami", None)]
)
def test_device_plugins_that_count_containers_are_not_asked_twice(setting: str, devices: int | None) -> None:
    container = doctor(setting)
    assert set(container["resources"]["limits"]) == {"cpu", "memory"} == set(container["resources"]["requests"])
    assert wanted(container).devices == devices


@pytest.mark.parametrize(
    "change", ["steps=11", "checkpoint={path: /storage/runs, everySteps: 1, keep: 9}", "failurePolicy.maxRestarts=9"]
)
def test_what_may_change_while_a_job_runs_changes_no_pod(change: str) -> None:
    """Kueue stops a job whose pods would be others."""
    assert pods() == pods(change)


def test_the_command_hands_any_text_over_as_it_is(tmp_path: Path) -> None:
    text = "a'b\"c $(HOME) `id` ${X} \\ ;|"
    container = doctor(f"environment.trainer={{NOTE: {json.dumps(text)}}}", "resources.profile=cuda")
    value = next(entry["value"] for entry in container["env"] if entry["name"] == WANTED_VARIABLE)
    assert "$$(HOME)" in value
    program = tmp_path / "rljob"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}{os.pathsep}/usr/bin:/bin", WANTED_VARIABLE: value.replace("$$(", "$(")},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    arguments = done.stdout.splitlines()
    assert arguments[:2] == ["doctor", "--wanted"]
    assert Wanted.model_validate_json(arguments[2]).trainer["NOTE"] == text
    assert arguments[3:] == ["--termination-message", "/dev/termination-log"]
