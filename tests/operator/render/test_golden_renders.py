"""Render of each profile, word by word. `UPDATE_GOLDEN=1 pytest ...` writes the files anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from render_cases import PUBLISHED, SETTINGS, base, view

from rljob_api.spec import Profile
from rljob_operator.render import (
    driver_manifest,
    render_cluster,
    render_policy,
    render_secret,
    role_environment,
    submission,
)
from rljob_operator.state.observed import JobView

GOLDEN = Path(__file__).parent / "golden"
JOBS: dict[str, JobView] = {
    **{f"profile-{p.value}": base(f"resources.profile={p.value}", f"metadata.name={p.value}") for p in Profile},
    **{name: view(path) for name, path in PUBLISHED.items()},
    "host-network": base("network.hostNetwork=true", "metadata.name=host-network"),
    "kueue": base("scheduling={system: Kueue, queue: research, priorityClass: high}", "metadata.name=kueue"),
    "volcano": base("scheduling={system: Volcano, queue: research, priorityClass: high}", "metadata.name=volcano"),
    "mindcluster-super-pod": base(
        "resources={profile: ascend-a3, nodes: 4, devicesPerNode: 16}",
        "scheduling={system: MindCluster, queue: research, superPodBlock: 32}",
        "resources.overrides.nodeSelector={accelerator-type: module-a3-16-super-pod}",
        "metadata.name=super-pod",
    ),
    "everything-overridden": base(
        "metadata.name=overridden",
        "image=registry.example/other:1",
        "resources.overrides={resourceName: example.com/npu, rayResource: NPU, runtimeClass: ascend, nodeSelector: {},"
        " driverPath: /opt/driver, hostMounts: [/usr/local/Ascend/driver, /etc/hccn.conf], environment: {A: '1'}}",
        "resources.tuning={taskQueueEnable: 1, cpuAffinity: '0', multiStreamMemoryReuse: 3,"
        " combinedEnable: false, ompNumThreads: 8, compileCachePath: /var/cache/npu, compileCacheMib: 100,"
        " logLevel: INFO}",
        "resources.head={cpu: 500m, memory: 4Gi}",
        "resources.worker={cpu: '64', memory: 512Gi}",
        "storage.sharedMemory=100Gi",
        "hccl={interface: '=enp1', execTimeoutSeconds: 3600, deterministic: false, bufferSizeMb: 100,"
        " opExpansionMode: AIV, trainerPorts: {host: {first: 60000, last: 60050}, device: {first: 61000, last: 61050}},"
        " rolloutPorts: {host: {first: 60100, last: 60150}}}",
        "memorySaver.mode=torch",
        "environment={variables: {B: '2'}, trainer: {C: '3'}, rollout: {D: '4'}, secrets: [hub], pythonPath: [/code]}",
        "pods={imagePullPolicy: Always, imagePullSecrets: [pull], serviceAccount: trainer, labels: {team: rl},"
        " annotations: {note: text}, terminationGraceSeconds: 600}",
        "pods.worker={spec: {containers: [{name: ray-worker, env: [{name: A, value: '9'}], livenessProbe: null},"
        " {name: sidecar, image: registry.example/sidecar:1}]}}",
        "scheduling.tolerations=[{key: npu, operator: Exists, effect: NoSchedule}]",
        "scheduling.nodeSelector={zone: a}",
        "network={rayAuthentication: 'Off', networkPolicy: false}",
    ),
}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def rendered(job: JobView) -> str:
    assert job.spec is not None
    body = submission(job, 0, SETTINGS)
    body["runtime_env"]["env_vars"]["RLJOB_MANIFEST"] = "packed; unpacked in the last document"
    documents = [
        render_cluster(job, SETTINGS),
        render_policy(job, SETTINGS),
        render_secret(job, "not-a-secret"),
        {"trainer": role_environment(job.spec, "trainer"), "rollout": role_environment(job.spec, "rollout")},
        body,
        driver_manifest(job, SETTINGS),
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_rendered_objects(name: str) -> None:
    path, text = GOLDEN / f"{name}.yaml", rendered(JOBS[name])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.name} is missing; UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text(encoding="utf-8"), "rendering changed; UPDATE_GOLDEN=1 writes the files anew"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(JOBS)
