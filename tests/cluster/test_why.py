"""`kubectl rljob why` on a real API server: each cause comes from the program that really says it, where it is here.

No operator runs: the RayClusters are rendered with its code and applied by the test, so that what is seen is theirs.
Volcano is played by an object of its kind, and a kubelet's complaints by a pod's status; Kueue itself is in
`test_kueue.py`.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from control_plane import ControlPlane, unique
from kube import Kube, wait_until
from kwok_cluster import HOLD
from network import Network
from small_jobs import small_job

from rljob_api.wire.step_record import StepRecord
from rljob_operator.plugin.main import main
from rljob_operator.plugin.observe import parse_job
from rljob_operator.render import RenderSettings, render_cluster

pytestmark = pytest.mark.cluster
NAME = "job"
SECONDS = 40.0

Why = Callable[[], dict[str, Any]]


@pytest.fixture
def run(control_plane: ControlPlane, namespace: str) -> Callable[..., str]:
    """Run a command inside the network namespace; returns what it prints."""
    kubeconfig = str(control_plane.kubeconfig())

    def command(*arguments: str) -> str:
        out = io.StringIO()
        with redirect_stdout(out):
            options = ("-n", namespace, "--kubeconfig", kubeconfig)
            assert control_plane.network.run(lambda: main([*arguments, *options])) == 0
        return out.getvalue()

    return command


@pytest.fixture
def why(run: Callable[..., str]) -> Why:
    return lambda: json.loads(run("why", NAME, "-o", "json"))


@pytest.fixture
def submit(kube: Kube, namespace: str, kuberay: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Create a job and the RayCluster that the operator would make of it."""
    kuberay("1.6.2")

    def create(*settings: str, phase: str = "Queued", cluster: dict[str, Any] | None = None) -> dict[str, Any]:
        job = kube.create(small_job(namespace, NAME, *settings))
        kube.patch("RLJob", namespace, NAME, {"status": {"phase": phase}}, "status")
        rendered = render_cluster(parse_job(job), RenderSettings(kuberay_version=(1, 6, 2)))
        _merge(rendered, cluster or {})
        return kube.apply(rendered)

    return create


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def reached(why: Why, reason: str, *parts: str) -> None:
    """Wait until `why` says it: schedulers and controllers take their time."""
    said: list[dict[str, Any]] = [{}]

    def says() -> bool:
        said[0] = why()
        return said[0]["reason"] == reason

    assert wait_until(says, SECONDS), f"{reason} was expected and not said: {said[0]}"
    for part in parts:
        assert part in said[0]["message"], said[0]["message"]


def ascend(*settings: str) -> tuple[str, ...]:
    return ("resources.profile=ascend-a2", "resources.overrides.nodeSelector={}", *settings)


@pytest.mark.parametrize(
    ("settings", "reason", "parts"),
    [
        (
            ascend("resources.overrides.resourceName=huawei.com/ascend-1980"),
            "NoSuchResource",
            ("huawei.com/Ascend910",),
        ),
        (
            ascend("resources.devicesPerNode=4", "resources.overrides.resourceName=test.rljob.dev/pair"),
            "NodeTooSmall",
            ("asks for 4", "has 2"),
        ),
        (("resources.worker.cpu='2000'",), "InsufficientResources", ("spec.resources.worker.cpu",)),
        (("scheduling.nodeSelector={zone: nowhere}",), "NodeSelector", ("spec.scheduling.nodeSelector",)),
        (
            ("storage.volumes=[{name: shared, mountPath: /shared, claim: models}]",),
            "VolumeClaimMissing",
            ("make the claim models",),
        ),
        (
            ("pods.worker={spec: {schedulingGates: [{name: test.rljob.dev/gate}]}}",),
            "SchedulingGated",
            ("scheduling gate",),
        ),
        (("pods.serviceAccount=trainer",), "ServiceAccountMissing", ('serviceaccount "trainer" not found',)),
        (("scheduling.priorityClass=urgent",), "PriorityClassMissing", ("spec.scheduling.priorityClass",)),
    ],
)
def test_what_scheduler_and_kuberay_say(
    submit: Callable[..., Any], why: Why, settings: tuple[str, ...], reason: str, parts: tuple[str, ...]
) -> None:
    submit(*settings)
    reached(why, reason, NAME, *parts)


def test_devices_that_are_all_taken(submit: Callable[..., Any], why: Why, kube: Kube, namespace: str) -> None:
    taken = unique("taken")
    sizes = {"cpu": "1000", "memory": "8Ti", "pods": "100", "test.rljob.dev/npu": "4"}
    labels = {"kubernetes.io/hostname": taken, "taken": taken}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": taken, "labels": labels}}
    kube.create({**node, "status": {"capacity": sizes, "allocatable": sizes}})
    limits = {"cpu": "1", "test.rljob.dev/npu": "3"}
    container = {"name": "x", "image": "x", "resources": {"limits": limits}}
    spec = {"nodeSelector": {"taken": taken}, "containers": [container]}
    meta = {"name": "other", "namespace": namespace}
    kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    kube.wait_for("Pod", namespace, "other", lambda pod: pod["spec"].get("nodeName"))
    submit(*ascend("resources.overrides.resourceName=test.rljob.dev/npu", "resources.devicesPerNode=4"))
    reached(why, "DevicesTaken", "test.rljob.dev/npu")
    kube.delete("Node", None, taken)


def test_a_taint(submit: Callable[..., Any], why: Why, kube: Kube) -> None:
    tainted = [{"key": "test.rljob.dev/reserved", "effect": "NoSchedule"}]
    nodes = [node["metadata"]["name"] for node in kube.list("Node")]
    try:
        for name in nodes:
            kube.patch("Node", None, name, {"spec": {"taints": tainted}})
        submit()
        reached(why, "Taint", "spec.scheduling.tolerations")
    finally:
        for name in nodes:
            kube.patch("Node", None, name, {"spec": {"taints": None}})


def test_a_resource_quota(submit: Callable[..., Any], why: Why, kube: Kube, namespace: str) -> None:
    meta = {"name": "team", "namespace": namespace}
    kube.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": {"hard": {"pods": "1"}}})
    kube.wait_for("ResourceQuota", namespace, "team", lambda quota: quota.get("status", {}).get("hard"))
    submit()
    reached(why, "ResourceQuota", "exceeded quota: team")


def test_a_cluster_that_kuberay_refuses(submit: Callable[..., Any], why: Why) -> None:
    submit(cluster={"spec": {"headGroupSpec": {"resources": {"CPU": "1"}, "rayStartParams": {"num-cpus": "0"}}}})
    reached(why, "ClusterRefused", NAME, "InvalidRayClusterSpec", "should not be set in both")


def test_a_name_that_is_taken(why: Why, kube: Kube, namespace: str) -> None:
    job = kube.create(small_job(namespace, NAME))
    rendered = render_cluster(parse_job(job), RenderSettings())
    del rendered["metadata"]["ownerReferences"]
    kube.apply(rendered)
    kube.patch("RLJob", namespace, NAME, {"status": {"phase": "Pending"}}, "status")
    reached(why, "ClusterNameTaken", "was not made by the operator")


def test_nobody_looks_at_the_job(why: Why, kube: Kube, namespace: str) -> None:
    kube.create(small_job(namespace, NAME))
    reached(why, "NotSeen", NAME)
    kube.patch("RLJob", namespace, NAME, {"status": {"phase": "Pending"}}, "status")
    reached(why, "ClusterMissing", NAME)
    kube.patch("RLJob", namespace, NAME, {"spec": {"suspend": True}})
    reached(why, "Suspended", f"kubectl rljob resume {NAME}")


@pytest.mark.parametrize(
    ("state", "reason", "part"),
    [
        (
            {
                "waiting": {
                    "reason": "ImagePullBackOff",
                    "message": 'Back-off pulling image "registry.example/x:1": not found',
                }
            },
            "ImagePull",
            "registry.example/x:1",
        ),
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "wandb" not found'}},
            "ContainerConfig",
            "wandb",
        ),
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "OutOfMemory", "exit code 137"),
        ({"terminated": {"reason": "Error", "exitCode": 3, "message": "bad flag"}}, "ContainerExited", "exit code 3"),
    ],
)
def test_what_a_kubelet_says(
    submit: Callable[..., Any], why: Why, kube: Kube, namespace: str, state: dict[str, Any], reason: str, part: str
) -> None:
    submit(f"pods.annotations={{{HOLD}: 'true'}}")
    assert wait_until(lambda: any(pod["spec"].get("nodeName") for pod in kube.list("Pod", namespace)), SECONDS)
    head = next(pod for pod in kube.list("Pod", namespace) if pod["metadata"]["labels"]["ray.io/node-type"] == "head")
    about = {"name": "ray-head", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    status = {"phase": "Pending", "containerStatuses": [about]}
    kube.patch("Pod", namespace, head["metadata"]["name"], {"status": status}, "status")
    reached(why, reason, head["metadata"]["name"], part)


def test_an_event_of_a_pod(submit: Callable[..., Any], why: Why, kube: Kube, namespace: str) -> None:
    submit(f"pods.annotations={{{HOLD}: 'true'}}")
    assert wait_until(lambda: any(pod["spec"].get("nodeName") for pod in kube.list("Pod", namespace)), SECONDS)
    head = next(pod for pod in kube.list("Pod", namespace) if pod["metadata"]["labels"]["ray.io/node-type"] == "head")
    about = {"kind": "Pod", "namespace": namespace, "name": head["metadata"]["name"], "uid": head["metadata"]["uid"]}
    event = {
        "type": "Warning",
        "reason": "FailedMount",
        "message": "hostPath type check failed: /models is no directory",
    }
    meta = {"name": "mount", "namespace": namespace}
    times = {"lastTimestamp": "2030-01-01T00:00:00Z"}
    kube.create({"apiVersion": "v1", "kind": "Event", "metadata": meta, "involvedObject": about, **event, **times})
    reached(why, "FailedMount", "hostPath type check failed")


@pytest.fixture(scope="session")
def pod_groups(control_plane: ControlPlane) -> None:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup", "listKind": "PodGroupList"}
    spec = {"group": "scheduling.volcano.sh", "names": names, "scope": "Namespaced", "versions": [version]}
    control_plane.install_crds(
        [
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": "podgroups.scheduling.volcano.sh"},
                "spec": spec,
            }
        ]
    )


def test_what_volcano_says(submit: Callable[..., Any], pod_groups: None, why: Why, kube: Kube, namespace: str) -> None:
    cluster = submit("scheduling.system=Volcano", "scheduling.queue=rl")
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": NAME, "uid": cluster["metadata"]["uid"]}
    meta = {"name": "waits", "namespace": namespace, "ownerReferences": [{**owner, "controller": True}]}
    status = {
        "type": "Unschedulable",
        "status": "True",
        "reason": "NodePredicateFailed",
        "message": "node<npu-1> is not of the job's accelerator-type",
    }
    document = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": meta}
    kube.create({**document, "status": {"conditions": [status]}})
    reached(why, "NodePredicateFailed", "Volcano has not admitted PodGroup", "accelerator-type", "waits")


# --- the way to the head -----------------------------------------------------------------------


@pytest.fixture
def driver(control_plane: ControlPlane) -> Iterator[list[dict[str, str]]]:
    """A driver's endpoint at the address of a pod in the node's network; yields the headers that it got."""
    seen: list[dict[str, str]] = []
    status = {"ready": True, "step": 2, "attempt": 0, "phase": "rollout", "stopping": False, "last_checkpoint_step": 1}
    phases = {"rollout": 30.0, "actor_train": 15.0}
    record = StepRecord(2, 0, 0.0, 50.0, phases, other=5.0, switch_seconds=0.0, metrics={}, index=1).to_json()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            steps = {"steps": [record] if self.path == "/v1/steps?after=-1" else [], "total": 2}
            body = json.dumps(steps if "steps" in self.path else status).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer((Network.ADDRESS, 8300), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = control_plane.network.listen(Network.ADDRESS, 8300)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield seen
    server.shutdown()
    server.server_close()


def test_the_token_passes_the_api_servers_proxy(
    run: Callable[..., str], kube: Kube, namespace: str, driver: list[dict[str, str]]
) -> None:
    """The API server takes `Authorization` away from every request."""
    job = kube.create(small_job(namespace, NAME))
    rendered = render_cluster(parse_job(job), RenderSettings())
    cluster = kube.apply({**rendered, "spec": {**rendered["spec"], "managedBy": "kueue.x-k8s.io/multikueue"}})
    owner = rendered["metadata"]["ownerReferences"]
    kube.patch("RayCluster", namespace, NAME, {"status": {"head": {"podName": "head"}}}, "status")
    labels = {"ray.io/cluster": NAME, "ray.io/node-type": "head"}
    node = kube.list("Node")[0]["metadata"]["name"]
    spec = {"nodeName": node, "hostNetwork": True, "containers": [{"name": "x", "image": "x"}]}
    of_cluster = {"apiVersion": cluster["apiVersion"], "kind": "RayCluster", "name": NAME, "controller": True}
    owners = [{**of_cluster, "uid": cluster["metadata"]["uid"]}]
    meta = {"name": "head", "namespace": namespace, "labels": labels, "ownerReferences": owners}
    kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    kube.wait_for("Pod", namespace, "head", lambda pod: pod.get("status", {}).get("podIP") == Network.ADDRESS)
    data = {"token": base64.b64encode(b"driver-token").decode()}
    meta = {"name": f"{NAME}-driver", "namespace": namespace, "ownerReferences": owner}
    kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
    attempt = {"number": 0, "submissionId": "s", "startTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "attempt": 0, "attempts": [attempt], "progress": {"step": 2}}
    kube.patch("RLJob", namespace, NAME, {"status": status}, "status")
    assert "The last 1 of 2 step records" in run("status", NAME)
    asked = driver[-1]
    assert "authorization" not in asked
    assert asked["x-rljob-authorization"] == "Bearer driver-token"
    assert asked["x-rljob-peek"] == "1"
