"""Demands of KubeRay, Kubernetes, the queues and the devices on a RayCluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from render_cases import EXAMPLE, SETTINGS, base, head_pod, variables, view, worker_pod

from rljob_api.profiles import PROFILES
from rljob_api.spec import Profile
from rljob_api.validation import ManifestError
from rljob_operator.render import RenderError, RenderSettings, check_renderable, render_cluster
from rljob_operator.render.cann import cann_environment
from rljob_operator.state.observed import JobView

NPU_PROFILES = ["ascend-a2", "ascend-a3", "ascend-950", "cce", "hami"]


def rendered(*settings: str, using: RenderSettings = SETTINGS) -> dict[str, Any]:
    return render_cluster(base(*settings), using)


@pytest.mark.parametrize("profile", [p.value for p in Profile])
def test_ray_resources(profile: str) -> None:
    cluster = rendered(f"resources.profile={profile}", f"metadata.name={profile}")
    head, group = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"][0]
    # KubeRay refuses the group's `resources` beside any of these.
    for params, resources in (
        (head["rayStartParams"], head.get("resources")),
        (group["rayStartParams"], group["resources"]),
    ):
        if resources:
            assert not {"num-cpus", "num-gpus", "memory", "resources", "labels"} & set(params)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    expected = {"cpu": {}, "cuda": {"GPU": "8"}}.get(profile, {"NPU": "8"})
    assert {name: count for name, count in group["resources"].items() if name != "CPU"} == expected
    assert int(group["resources"]["CPU"]) >= 8
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    assert "suspend" not in cluster["spec"]


@pytest.mark.parametrize("mode", ["Disaggregated", "Async"])
def test_devices_of_their_own_for_trainers_and_engines_are_all_in_one_pod(mode: str) -> None:
    """Weights go across in its shared memory."""
    groups = "{profile: cpu, trainer: {devicesPerNode: 2}, rollout: {devicesPerNode: 4}}"
    cluster = rendered(f"mode={mode}", f"resources={groups}")
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 1)
    assert int(group["resources"]["CPU"]) >= 6
    assert int(worker_pod(cluster)["containers"][0]["resources"]["limits"]["cpu"]) >= 6


def test_devices_of_a_judge_alone_are_in_the_pods_of_the_others() -> None:
    judge = "[{name: a, kind: Score, model: {path: /models/score, devicesPerNode: 2}}]"
    cluster = rendered("resources.devicesPerNode=4", f"judges={judge}", "reward={name: judge}")
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["resources"]["NPU"]) == (2, "6")
    assert worker_pod(cluster)["containers"][0]["resources"]["limits"]["huawei.com/Ascend910"] == "6"


def test_trainers_and_engines_have_worker_groups_of_their_own() -> None:
    trainer = "{nodes: 2, devicesPerNode: 2, worker: {memory: 9Gi}}"
    groups = f"{{profile: cpu, trainer: {trainer}, rollout: {{nodes: 3, devicesPerNode: 4}}, worker: {{memory: 7Gi}}}}"
    cluster = rendered("mode=Async", f"resources={groups}")
    trainers, engines = cluster["spec"]["workerGroupSpecs"]
    for group, name, nodes, devices, memory in (
        (trainers, "trainers", 2, 2, "9Gi"),
        (engines, "engines", 3, 4, "7Gi"),
    ):
        assert group["groupName"] == name
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == nodes
        assert int(group["resources"]["CPU"]) >= devices
        pod = group["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["memory"] == memory
        [apart] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
        assert apart["labelSelector"]["matchLabels"]["ray.io/group"] == name, "beside the other group's it may lie"


@pytest.mark.parametrize("profile", [p.value for p in Profile])
def test_devices_are_the_workers_alone_and_requests_equal_limits(profile: str) -> None:
    cluster = rendered(f"resources.profile={profile}", f"metadata.name={profile}")
    name = PROFILES[Profile(profile)].resource_name
    for pod in (head_pod(cluster), worker_pod(cluster)):
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
    assert set(head_pod(cluster)["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
    limits = worker_pod(cluster)["containers"][0]["resources"]["limits"]
    assert {key: value for key, value in limits.items() if key == name} == ({name: "8"} if name else {})
    if profile in NPU_PROFILES:
        assert variables(head_pod(cluster))["ASCEND_VISIBLE_DEVICES"] == "void"
        assert variables(head_pod(cluster))["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in variables(worker_pod(cluster))
        assert "ASCEND_VISIBLE_DEVICES" not in variables(worker_pod(cluster))


@pytest.mark.parametrize("profile", [p.value for p in Profile])
def test_safe_pods(profile: str) -> None:
    cluster = rendered(f"resources.profile={profile}", f"metadata.name={profile}")
    for pod in (head_pod(cluster), worker_pod(cluster)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = pod["containers"][0]["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert "privileged" not in security
        mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        for volume in pod["volumes"]:
            if "hostPath" in volume:
                assert mounts[volume["name"]].get("readOnly") is True
        if profile in ("cpu", "cuda"):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert variables(pod)["HOME"] == "/tmp"


@pytest.mark.parametrize(
    ("profile", "paths"),
    [
        *(
            (
                profile,
                [
                    "/usr/local/Ascend/driver",
                    "/usr/local/Ascend/add-ons",
                    "/usr/local/dcmi",
                    "/usr/local/bin/npu-smi",
                    "/etc/ascend_install.info",
                    "/etc/hccn.conf",
                ],
            )
            for profile in ("ascend-a2", "ascend-a3", "ascend-950")
        ),
        ("cce", ["/usr/local/Ascend/driver/tools"]),
        ("hami", []),
        ("cuda", []),
        ("cpu", []),
    ],
)
def test_files_of_the_node(profile: str, paths: list[str]) -> None:
    cluster = rendered(f"resources.profile={profile}", f"metadata.name={profile}")
    found = [volume["hostPath"]["path"] for volume in worker_pod(cluster)["volumes"] if "hostPath" in volume]
    assert found == paths
    assert not [volume for volume in head_pod(cluster)["volumes"] if "hostPath" in volume]


def test_driver_elsewhere_on_the_node() -> None:
    for profile, expected in (("ascend-a2", "/opt/npu"), ("cce", "/opt/npu/tools")):
        worker = worker_pod(rendered(f"resources={{profile: {profile}, overrides: {{driverPath: /opt/npu/}}}}"))
        assert worker["volumes"][1]["hostPath"]["path"] == expected
        assert worker["containers"][0]["volumeMounts"][1]["mountPath"].startswith("/usr/local/Ascend/driver")


@pytest.mark.parametrize("version", [(1, 4, 2), (1, 3), (0, 9)])
def test_old_kuberay_is_refused(version: tuple[int, ...]) -> None:
    with pytest.raises(RenderError, match=r"1\.5 or later is needed"):
        rendered(using=replace(SETTINGS, kuberay_version=version))


@pytest.mark.parametrize(
    ("kuberay", "ray", "given", "expected"),
    [
        ((1, 5, 1), "2.60.0", "Auto", {"mode": "token"}),
        ((1, 6), "2.52.0", "Auto", {"mode": "token"}),
        ((1, 6, 2), "2.60.0", "Token", {"mode": "token"}),
        ((1, 6, 2), "2.60.0", "'Off'", None),
        ((1, 5, 0), "2.60.0", "Auto", None),
        ((1, 5), "2.60.0", "Auto", None),
        ((1, 6, 2), "2.51.1", "Auto", None),
    ],
)
def test_token_authentication(kuberay: tuple[int, ...], ray: str, given: str, expected: dict | None) -> None:
    using = replace(SETTINGS, kuberay_version=kuberay, ray_version=ray)
    cluster = rendered(f"network.rayAuthentication={given}", using=using)
    assert cluster["spec"].get("authOptions") == expected
    assert cluster["spec"]["rayVersion"] == ray


def test_token_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(RenderError, match=r"spec\.network\.rayAuthentication: Token needs KubeRay 1\.5\.1"):
        rendered("network.rayAuthentication=Token", using=replace(SETTINGS, kuberay_version=(1, 5, 0)))


def test_images() -> None:
    using = RenderSettings(worker_image="general", worker_images={"cpu": "for-cpu"}, kuberay_version=(1, 6, 2))
    for settings, expected in (
        ([], "general"),
        (["resources.profile=cpu"], "for-cpu"),
        (["resources.profile=cpu", "image=own"], "own"),
    ):
        cluster = rendered(*settings, using=using)
        assert {pod["containers"][0]["image"] for pod in (head_pod(cluster), worker_pod(cluster))} == {expected}
    with pytest.raises(
        RenderError, match=r"spec\.image: is missing, and the operator has no default for profile ascend"
    ):
        rendered(using=RenderSettings())


def test_one_worker_a_node() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    one = worker_pod(rendered("resources.nodes=1"))
    assert "affinity" not in one
    user = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "zone"}
    both = worker_pod(rendered(f"scheduling.affinity={json.dumps({'podAntiAffinity': {required: [user]}})}"))[
        "affinity"
    ]["podAntiAffinity"][required]
    assert both[0] == user
    assert both[1]["topologyKey"] == "kubernetes.io/hostname"
    assert both[1]["labelSelector"]["matchLabels"] == {"rljob.dev/job": "base", "ray.io/node-type": "worker"}


def test_kueue() -> None:
    cluster = rendered("scheduling={system: Kueue, queue: research}")
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "schedulerName" not in worker_pod(cluster)
    with pytest.raises(ManifestError, match=r"spec\.scheduling\.queue: is missing"):
        rendered("scheduling.system=Kueue")


def test_volcano() -> None:
    cluster = rendered("scheduling={system: Volcano, queue: research, priorityClass: high}")
    labels = cluster["metadata"]["labels"]
    assert labels["volcano.sh/queue-name"] == "research"
    assert labels["ray.io/priority-class-name"] == "high"
    for pod in (head_pod(cluster), worker_pod(cluster)):
        assert (pod["schedulerName"], pod["priorityClassName"]) == ("volcano", "high")


def test_mind_cluster() -> None:
    cluster = rendered("scheduling={system: MindCluster, queue: research}")
    head = cluster["spec"]["headGroupSpec"]["template"]["metadata"]
    worker = cluster["spec"]["workerGroupSpecs"][0]["template"]["metadata"]
    common = {"huawei.com/schedule_minAvailable": "3", "huawei.com/schedule_policy": "chip8-node8"}
    assert cluster["metadata"]["annotations"] == common
    assert common.items() <= worker["annotations"].items()
    assert head["annotations"]["huawei.com/skip-ascend-plugin"] == "enabled"
    assert "huawei.com/skip-ascend-plugin" not in worker["annotations"]
    assert head["labels"]["ring-controller.atlas"] == worker["labels"]["ring-controller.atlas"] == "ascend-910b"
    source = {"fieldRef": {"fieldPath": "metadata.annotations['huawei.com/Ascend910']"}}
    assert variables(worker_pod(cluster))["ASCEND_VISIBLE_DEVICES"] == source
    other = rendered("scheduling.system=MindCluster", "resources.profile=ascend-950", "metadata.name=a")
    source = {"fieldRef": {"fieldPath": "metadata.annotations['huawei.com/npu']"}}
    assert variables(worker_pod(other))["ASCEND_VISIBLE_DEVICES"] == source


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["scheduling={system: MindCluster, superPodBlock: 16}"], "only profiles ascend-a3 and ascend-950"),
        (
            ["resources={profile: ascend-a3, nodes: 2, devicesPerNode: 16}", "scheduling={system: MindCluster,"
             " superPodBlock: 24}"],
            "a multiple of the 16 devices of a node that divides the job's 32",
        ),
        (
            ["resources={profile: ascend-a3, nodes: 2, devicesPerNode: 16}", "scheduling={system: MindCluster,"
             " superPodBlock: 64}"],
            "divides the job's 32",
        ),
        (["resources={profile: ascend-950, nodes: 1, devicesPerNode: 16}"], "at most 8, on more nodes"),
        (
            ["resources={profile: ascend-a3, nodes: 2, devicesPerNode: 1}", "scheduling.system=MindCluster",
             "training.tensorParallel=1", "rollout.tensorParallel=1"],
            "ascend-a3 2 at a time; allowed: a multiple of 2",
        ),
    ],
)  # fmt: skip
def test_devices_that_mind_cluster_cannot_give(settings: list[str], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        rendered(*settings)


def test_sizes() -> None:
    worker = worker_pod(rendered("resources.profile=cpu", "resources.worker={cpu: 500m, memory: 4Gi}"))
    assert worker["volumes"][0]["emptyDir"]["sizeLimit"] == "2048Mi", "half of the memory at most"
    cluster = rendered("resources.profile=cpu", "resources.worker={cpu: 500m, memory: 4Gi}")
    assert cluster["spec"]["workerGroupSpecs"][0]["resources"] == {"CPU": "8"}
    threads = rendered("resources.profile=cpu", "resources.threadsPerDevice=3", "resources.worker.cpu='8'")
    assert threads["spec"]["workerGroupSpecs"][0]["resources"] == {"CPU": "24"}, "the worker reserves them in Ray"
    with pytest.raises(ManifestError, match=r"spec\.storage\.sharedMemory: .* part of the worker's memory"):
        rendered("storage.sharedMemory=1000Gi")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["checkpoint.path=/elsewhere"], "in no volume of the head"),
        (["checkpoint.path=null"], "the default is /rljob"),
        (["checkpoint.path=/storagerooms/x"], "in no volume of the head"),
        (["storage.volumes[0].readOnly=true"], "mounted read-only in the head"),
        (["storage.volumes=[{name: a, mountPath: /storage, source: {emptyDir: {}}}]"], "of the head alone"),
        (
            ["pods.worker={spec: {volumes: [{name: storage, emptyDir: {}}]}}"],
            "of the worker alone",
        ),
        (
            [
                "pods.worker={spec: {containers: [{name: ray-worker,"
                " volumeMounts: [{mountPath: /storage, subPath: w}]}]}}"
            ],
            "another volume in head and worker",
        ),
        (["checkpoint.path=/dev/shm/x"], "of the head alone"),
    ],
)
def test_run_folder_that_is_not_shared_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(RenderError, match=words) as error:
        rendered(*settings)
    assert error.value.field == "spec.checkpoint.path"


@pytest.mark.parametrize(
    "settings",
    [
        ["checkpoint.path=null", "storage.volumes=[{name: a, mountPath: /rljob, hostPath: /mnt/shared}]"],
        [
            "storage.volumes=[]",
            "pods.head={spec: {volumes: [{name: s, nfs: {server: h, path: /x}}],"
            " containers: [{name: ray-head, volumeMounts: [{name: s, mountPath: /storage}]}]}}",
            "pods.worker={spec: {volumes: [{name: s2, nfs: {server: h, path: /x}}],"
            " containers: [{name: ray-worker, volumeMounts: [{name: s2, mountPath: /storage}]}]}}",
        ],
    ],
)
def test_run_folder_that_is_shared(settings: list[str]) -> None:
    rendered(*settings)


def test_cann_is_found_without_a_login_shell(tmp_path: Path) -> None:
    toolkit = tmp_path / "set_env.sh"
    toolkit.write_text("export ASCEND_TOOLKIT_HOME=/toolkit PYTHONPATH=/toolkit/python\n")
    bash = shutil.which("bash")
    assert bash is not None

    def start(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # As KubeRay puts it together: the container's command, then its own.
        line = (
            f" {command}  && ulimit -n 1024; echo start $ASCEND_TOOLKIT_HOME $PYTHONPATH ${{PYTORCH_ALLOC_CONF-unset}}"
        )
        env = {"PATH": "/usr/bin:/bin", **environment}
        return subprocess.run([bash, "-c", "--", line], env=env, capture_output=True, text=True, timeout=20)

    command = cann_environment()
    assert "ray start" not in command, "KubeRay would take it for the whole command"
    found = start(command.replace("/usr/local/Ascend/ascend-toolkit/set_env.sh", str(toolkit)), PYTORCH_ALLOC_CONF="x")
    assert (found.returncode, found.stdout) == (0, "start /toolkit /toolkit/python unset\n"), found.stderr
    baked = start(command, ASCEND_TOOLKIT_HOME="/baked", PYTHONPATH="/p")
    assert (baked.returncode, baked.stdout) == (0, "start /baked /p unset\n")
    missing = start(command.replace("/usr/local/Ascend", str(tmp_path / "nowhere")))
    assert missing.returncode == 1
    assert "the image has no CANN" in missing.stderr
    assert "start" not in missing.stdout


def test_spec_that_does_not_validate() -> None:
    job = JobView("team", "a", "uid", 1, 0.0, None, problem="spec.steps: is missing")
    assert check_renderable(job, SETTINGS) == "spec: spec.steps: is missing"


def test_example_renders() -> None:
    assert check_renderable(view(EXAMPLE), SETTINGS) == ""
    text = str(render_cluster(view(EXAMPLE), SETTINGS))
    assert not re.search(r"None|privileged'", text)


def test_ray_waits_for_a_stopped_driver_to_save_and_sees_how_it_ended() -> None:
    cluster = rendered("checkpoint.graceSeconds=60.5")
    head, worker = variables(head_pod(cluster)), variables(worker_pod(cluster))
    assert head["RAY_JOB_STOP_WAIT_TIME_S"] == "76"
    subreaper = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
    assert subreaper not in head
    assert worker[subreaper] == "true"
    # Ray would do without it beside process groups.
    assert worker["RAY_process_group_cleanup_enabled"] == "false"


@pytest.mark.parametrize("binding", ["1", "2", "2,npu0:0-23", "npu_affine:1"])
def test_processes_of_a_node_are_not_bound_to_the_same_cores(binding: str) -> None:
    """torch_npu counts the devices that a process sees, and each sees its own as number 0."""
    with pytest.raises(ManifestError, match=r"spec\.resources\.tuning\.cpuAffinity: .* the same cores"):
        base(f"resources.tuning.cpuAffinity='{binding}'")
    alone = base(
        f"resources={{profile: ascend-a2, devicesPerNode: 1, tuning: {{cpuAffinity: '{binding}'}}}}",
        "rollout.tensorParallel=1",
        "training.tensorParallel=1",
    )
    assert variables(worker_pod(render_cluster(alone, SETTINGS)))["CPU_AFFINITY_CONF"] == binding
    assert "CPU_AFFINITY_CONF" not in variables(worker_pod(rendered()))


def test_workers_are_members_of_the_group_of_the_device_files() -> None:
    cluster = rendered()
    assert worker_pod(cluster)["securityContext"]["supplementalGroups"] == [1000]
    assert "supplementalGroups" not in head_pod(cluster)["securityContext"]


def test_the_nodes_cache_of_operators_is_made_writable_for_that_group_alone(tmp_path: Path) -> None:
    pod = worker_pod(rendered("resources.tuning.compileCachePath=/var/cache/npu"))
    first, *_ = pod["initContainers"]
    assert first["volumeMounts"] == [{"name": "rljob-operators", "mountPath": "/var/cache/rljob/operators"}]
    assert first["securityContext"]["runAsUser"] == 0
    assert "huawei.com/Ascend910" not in first["resources"]["limits"]
    folder = tmp_path / "cache"
    folder.mkdir()
    command = first["args"][0].replace("/var/cache/rljob/operators", str(folder)).replace("1000", str(os.getgid()))
    subprocess.run([*first["command"], command], check=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    assert [c["name"] for c in worker_pod(rendered())["initContainers"]] == ["rljob-doctor"]


def test_files_beside_the_manifest_are_refused() -> None:
    said = check_renderable(base("reward={parts: [{name: math}, {python: './my.py:score'}]}"), SETTINGS)
    assert said.startswith("spec.reward.parts[1].python: './my.py' lies beside the manifest, where no pod sees it")
    assert check_renderable(base("reward={python: '/storage/my.py:score'}"), SETTINGS) == ""
