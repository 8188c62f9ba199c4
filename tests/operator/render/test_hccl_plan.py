"""HCCL's interface, address and ports; contradictions are refused with the field."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from render_cases import SETTINGS, base, head_pod, variables, worker_pod

from rljob_api.validation import ManifestError
from rljob_operator.render import check_renderable, render_cluster
from rljob_operator.render.variables import role_environment

HOST_IP = {"fieldRef": {"fieldPath": "status.hostIP"}}
ROLES: tuple[Literal["trainer"], Literal["rollout"]] = ("trainer", "rollout")
NETWORK = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_IF_IP")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ["=eth0", "eth0", "eth0", None]),
        (["hccl.interface='=net1'"], ["=net1", "net1", "net1", None]),
        (["hccl.interface=enp"], ["enp", None, None, None]),
        (["hccl.interface='^docker'"], ["^docker", None, None, None]),
        (["hccl.interface='=a,b'"], ["=a,b", None, None, None]),
        (["network.hostNetwork=true"], [None, None, None, HOST_IP]),
        (["network.hostNetwork=true", "hccl.useHostIp=true"], [None, None, None, HOST_IP]),
        (["network.hostNetwork=true", "hccl.useHostIp=false"], [None, None, None, None]),
        (["network.hostNetwork=true", "hccl.interface='=enp1'"], ["=enp1", "enp1", "enp1", None]),
    ],
)
def test_interface_and_address(changes: list[str], expected: list[object]) -> None:
    job = base(*changes)
    cluster = render_cluster(job, SETTINGS)
    on_worker, on_head = variables(worker_pod(cluster)), variables(head_pod(cluster))
    for role in ROLES:
        seen = on_worker | role_environment(job.spec, role)
        assert [seen.get(name) for name in NETWORK] == expected
    if "network.hostNetwork=true" in changes:
        assert not [name for name in NETWORK if name in on_head], "the head is in the pod network"


def test_what_the_manifest_says_goes_to_both_roles_in_a_pod_and_without_one() -> None:
    job = base("hccl={execTimeoutSeconds: 60, bufferSizeMb: 120, opExpansionMode: HOST}")
    for role in ROLES:
        found = role_environment(job.spec, role)
        assert found["HCCL_CONNECT_TIMEOUT"] == "7200"
        assert found["HCCL_EXEC_TIMEOUT"] == "60"
        assert found["HCCL_DETERMINISTIC"] == "true"
        assert found["HCCL_BUFFSIZE"] == "120"
        assert found["HCCL_OP_EXPANSION_MODE"] == "HOST"
        assert found["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
        assert "HCCL_IF_BASE_PORT" not in found
    pods = render_cluster(job, SETTINGS)
    # Ports belong to roles: one range for a pod would be the same for trainer and engine of a device.
    for pod in (head_pod(pods), worker_pod(pods)):
        assert {name for name in variables(pod) if name.startswith("HCCL_")} == {"HCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_other_devices_have_no_hccl(profile: str) -> None:
    cluster = render_cluster(
        base(f"resources.profile={profile}", "hccl={opExpansionMode: AIV, deterministic: false}"), SETTINGS
    )
    for pod in (head_pod(cluster), worker_pod(cluster)):
        assert not [name for name in variables(pod) if "HCCL" in name or "ASCEND" in name or "NPU" in name]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (["hccl.rolloutPorts.device={first: 1, last: 2}"], "spec.hccl.rolloutPorts.device", "belong to the system"),
        (["hccl.rolloutPorts.host={first: 9000, last: 10002}"], "spec.hccl.rolloutPorts.host", "ports of Ray's"),
        (["environment.variables.HCCL_IF_BASE_PORT='60000'"], "spec.environment.variables", "bind the same ports"),
        (["environment.trainer.HCCL_IF_BASE_PORT='60000'"], "spec.environment.trainer", "bind the same ports"),
        (
            ["environment.rollout.HCCL_NPU_SOCKET_PORT_RANGE='1-2'"],
            "spec.environment.rollout",
            "take spec.hccl.trainerPorts.device",
        ),
        (["environment.variables.HCCL_IF_IP=10.0.0.1"], "spec.environment.variables", "take spec.hccl.useHostIp"),
        (["environment.variables.HCCL_SOCKET_IFNAME=eth1"], "spec.environment.variables", "take spec.hccl.interface"),
        (
            ["resources.overrides.environment.HCCL_DETERMINISTIC='false'"],
            "spec.resources.overrides.environment",
            "take spec.hccl.deterministic",
        ),
        (
            ["environment.trainer.PYTORCH_NPU_ALLOC_CONF='expandable_segments:True'"],
            "spec.environment.trainer",
            "expandable_segments:False in it, in so many words",
        ),
        (
            ["environment.variables.PYTORCH_NPU_ALLOC_CONF=''"],
            "spec.environment.variables",
            "expandable_segments:False in it, in so many words",
        ),
        (["environment.rollout.PYTORCH_ALLOC_CONF=x"], "spec.environment.rollout", "allowed: PYTORCH_NPU_ALLOC_CONF"),
        (["resources.overrides.environment.LD_PRELOAD=/x.so"], "spec.resources.overrides.environment", "memorySaver"),
        (["environment.variables.ASCEND_VISIBLE_DEVICES='0'"], "spec.environment.variables", "device plugin"),
        (["environment.rollout.ASCEND_RT_VISIBLE_DEVICES='0'"], "spec.environment.rollout", "Ray gives each process"),
    ],
)
def test_contradictions(changes: list[str], field: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words) as error:
        base(*changes)
    assert [problem.path.startswith(field) for problem in error.value.problems] == [True]


@pytest.mark.parametrize(
    "change",
    [
        "hccl={opExpansionMode: AIV, deterministic: false}",
        "environment.rollout.HCCL_BUFFSIZE='512'",
        "environment.trainer.HCCL_OP_EXPANSION_MODE=AI_CPU",
        "environment.trainer.PYTORCH_NPU_ALLOC_CONF='max_split_size_mb:256,expandable_segments:False'",
        "environment.rollout.LD_PRELOAD=/usr/lib/libjemalloc.so.2",
        "hccl.trainerPorts.host={first: 60000, last: 60050}",
    ],
)
def test_accepted(change: str) -> None:
    assert check_renderable(base(change), SETTINGS) == ""


APART = (
    "mode=Disaggregated",
    "resources={profile: ascend-a2, trainer: {nodes: 2, devicesPerNode: 4}, rollout: {nodes: 2, devicesPerNode: 4}}",
)


def ports_of(group: dict[str, Any]) -> set[int]:
    """Ports that are listened on or declared in the pods of a worker group."""
    start, pod = group["rayStartParams"], group["template"]["spec"]
    found = {port["containerPort"] for port in pod["containers"][0].get("ports", ())}
    found |= {int(start[name]) for name in ("dashboard-agent-listen-port", "metrics-export-port") if name in start}
    if "min-worker-port" in start:
        found |= {*range(int(start["min-worker-port"]), int(start["max-worker-port"]) + 1)}
    return found


def test_two_groups_in_a_servers_network_have_ports_of_their_own() -> None:
    trainers, engines = render_cluster(base("network.hostNetwork=true", *APART), SETTINGS)["spec"]["workerGroupSpecs"]
    assert len(ports_of(trainers)) > 9_000
    assert not ports_of(trainers) & ports_of(engines)
    for group in (trainers, engines):
        ray, *before = [group["template"]["spec"]["containers"][0], *group["template"]["spec"]["initContainers"]]
        declared = {port["name"]: port["containerPort"] for port in ray["ports"]}
        agent = int(group["rayStartParams"]["dashboard-agent-listen-port"])
        assert declared["agent"] == agent
        assert declared["metrics"] == int(group["rayStartParams"]["metrics-export-port"])
        assert {ray[probe]["httpGet"]["port"] for probe in ray if probe.endswith("Probe")} == {agent}
        assert not any("ports" in container for container in before)


def test_pods_of_two_jobs_in_the_nodes_network_are_kept_apart_by_their_ports() -> None:
    jobs = [render_cluster(base("network.hostNetwork=true", *changes), SETTINGS) for changes in ((), APART)]
    groups = [job["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["ports"] for job in jobs]
    assert groups[0] == groups[1]


def test_pods_with_a_network_of_their_own_have_rays_usual_ports() -> None:
    for group in render_cluster(base(*APART), SETTINGS)["spec"]["workerGroupSpecs"]:
        assert "ports" not in group["template"]["spec"]["containers"][0]
        assert ports_of(group) == {SETTINGS.agent_port}


@pytest.mark.parametrize(("first", "fits"), [(10002, False), (25000, False), (30000, True)])
def test_hccl_ports_meet_none_of_rays_of_any_group(first: int, fits: bool) -> None:
    ports = f"hccl.trainerPorts={{host: {{first: {first}, last: {first + 50}}}}}"
    if fits:
        assert check_renderable(base("network.hostNetwork=true", *APART, ports), SETTINGS) == ""
        return
    with pytest.raises(ManifestError, match=r"spec.hccl.trainerPorts.host: .*meets the ports of Ray's processes"):
        base("network.hostNetwork=true", *APART, ports)


def test_without_the_nodes_network_or_groups_the_second_range_is_free() -> None:
    ports = "hccl.trainerPorts={host: {first: 25000, last: 25050}}"
    assert check_renderable(base(*APART, ports), SETTINGS) == ""
    assert check_renderable(base("network.hostNetwork=true", ports), SETTINGS) == ""
