"""A real Kubernetes control plane in a network namespace of its own; kwok plays the nodes."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kube import ApiError, Kube, conditions, wait_until
from network import Network
from processes import Process
from programs import files, program

READY_SECONDS = 60.0
KUBERAY_VERSIONS = ("1.6.2", "1.5.1")
HOLD = "test.rljob.dev/hold"
"""Pods with this annotation stay Pending after they were bound, as with an image that takes its time."""
LOST = "test.rljob.dev/lost"
"""Nodes with this annotation are left alone by kwok, so that a test can break them."""
NODE_RESOURCES = {
    "cpu": "1000", "memory": "8Ti", "pods": "1000", "ephemeral-storage": "8Ti",
    "huawei.com/Ascend910": "2000", "huawei.com/npu": "2000", "nvidia.com/gpu": "2000",
    "test.rljob.dev/pair": "2",
}  # fmt: skip
_API_PORT = 6443
_ETCD = "http://127.0.0.1:2379"
_CONTROLLERS = (
    "garbage-collector-controller", "namespace-controller", "serviceaccount-controller", "resourcequota-controller",
    "node-lifecycle-controller", "taint-eviction-controller", "pod-garbage-collector-controller",
    "clusterrole-aggregation-controller",
)  # fmt: skip


class ControlPlane:
    """etcd, API server, controller manager, scheduler, kwok and one KubeRay; `start` to `stop`.

    Args:
        folder: for data, keys and logs; it must be empty.
        crds: manifests of the custom resource definitions to install before the controllers start: the garbage
            collector looks for new kinds only every half minute.
        nodes: how many nodes kwok plays.
    """

    def __init__(self, folder: Path, crds: list[Mapping[str, Any]], nodes: int = 8) -> None:
        self.folder = folder
        self.network = Network()
        self.server = f"https://{Network.ADDRESS}:{_API_PORT}"
        self._crds = crds
        self._nodes = nodes
        self.admin_token = secrets.token_urlsafe()
        self._running: list[Process] = []
        self._kuberay: tuple[str, Process] | None = None
        self._crds_version = ""
        self.kube: Kube

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything but KubeRay. Raises RuntimeError with the log of what did not start."""
        self._write_keys()
        etcd = self._run_etcd()
        api_server = self._run_api_server()
        self.kube = self._client(api_server)
        self._running = [etcd, api_server]
        for crd in [*self._crds, *_crds(files("kwok", "kustomize") / "crd" / "bases", "stages")]:
            self._install(crd)
        self._install_kuberay_crds(KUBERAY_VERSIONS[0])
        for crd in self.kube.list("CustomResourceDefinition"):
            self._wait_established(crd["metadata"]["name"])
        self._running += [self._run_controller_manager(), self._run_scheduler()]
        for stage in _stages():
            self.kube.apply(stage)
        self._running.append(self._run_kwok())
        for number in range(self._nodes):
            self.add_node(f"node-{number}")
        self.wait_nodes()

    def stop(self) -> None:
        """End everything, the API server before etcd: without its etcd it hangs in its graceful shutdown for good."""
        if self._kuberay is not None:
            self._kuberay[1].kill()
        for process in reversed(self._running[2:]):
            process.kill()
        for process in reversed(self._running[:2]):
            process.stop(3)
        self._running, self._kuberay = [], None
        self.network.close()

    def check(self) -> None:
        """Raise RuntimeError when a program has ended by itself."""
        for process in [*self._running, *([self._kuberay[1]] if self._kuberay else [])]:
            if not process.running:
                raise RuntimeError(f"{process.name} has ended:\n{process.tail()}")

    def use_kuberay(self, version: str, *flags: str) -> Process:
        """Run this version of KubeRay, with its CRDs, and no other one."""
        if self._kuberay is not None:
            if self._kuberay[0] == f"{version} {flags}" and self._kuberay[1].running:
                return self._kuberay[1]
            self._kuberay[1].stop()
        self._install_kuberay_crds(version)
        probe = 8082
        command = [
            str(program(f"ray-operator-{version}")),
            "-enable-leader-election=false",
            "-metrics-addr=127.0.0.1:8080",
            f"-health-probe-bind-address=127.0.0.1:{probe}",
            "-reconcile-concurrency=10",
            *flags,
        ]
        process = self.run(f"kuberay-{version}", command, {"KUBECONFIG": str(self.kubeconfig())})
        self._kuberay = (f"{version} {flags}", process)
        process.wait_for(lambda: self._http_ok(probe, "/readyz"), READY_SECONDS)
        return process

    @property
    def kuberay_version(self) -> str:
        """Version of the KubeRay that runs, or of the one that would be first."""
        return self._kuberay[0].split()[0] if self._kuberay is not None else KUBERAY_VERSIONS[0]

    # --- nodes ---------------------------------------------------------------------------------

    def add_node(self, name: str, pool: str | None = None) -> None:
        """Let kwok play one more node; that of a pool takes only pods that tolerate its taint `pool`."""
        sizes, labels = dict(NODE_RESOURCES), {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        if pool is not None:
            labels["pool"] = pool
            node["spec"] = {"taints": [{"key": "pool", "value": pool, "effect": "NoSchedule"}]}
        self.kube.create({**node, "status": {"capacity": sizes, "allocatable": sizes}})

    def wait_nodes(self) -> None:
        """Wait until all nodes take pods."""

        def usable() -> bool:
            nodes = self.kube.list("Node")
            return all(
                conditions(node).get("Ready", {}).get("status") == "True" and not node["spec"].get("taints")
                for node in nodes
            )

        if not wait_until(usable, READY_SECONDS):
            raise RuntimeError(f"kwok's nodes were not ready after {READY_SECONDS:.0f} s (logs: {self.folder})")

    # --- programs ------------------------------------------------------------------------------

    def run(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a program inside the namespace."""
        return Process(self.network, self.folder, name, command, environment)

    def kubeconfig(self, token: str | None = None, server: str | None = None) -> Path:
        """Write a kubeconfig for the administrator, or for whoever has the token; `server` may be a proxy's address."""
        cluster = {"server": server or self.server}
        if cluster["server"].startswith("https:"):
            cluster["certificate-authority"] = str(self.authority)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or self.admin_token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        descriptor, path = tempfile.mkstemp(prefix="kubeconfig-", suffix=".yaml", dir=self.folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(config, file)
        return Path(path)

    def token_of(self, namespace: str, account: str) -> str:
        """Return a token of a service account, as a pod would get it."""
        path = self.kube.path("ServiceAccount", namespace, account, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
        token: str = self.kube.request("POST", path, body)["status"]["token"]
        return token

    @property
    def authority(self) -> Path:
        return self.folder / "certs" / "apiserver.crt"

    def _write_keys(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / "accounts.key").write_bytes(private)
        (self.folder / "accounts.pub").write_bytes(public)
        (self.folder / "tokens.csv").write_text(f'{self.admin_token},admin,admin,"system:masters"\n')

    def _run_etcd(self) -> Process:
        command = [
            str(program("etcd")),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=4294967296",
            "--log-level=warn",
        ]
        etcd = self.run("etcd", command)
        etcd.wait_for(lambda: self._http_ok(2379, "/health"), READY_SECONDS)
        return etcd

    def _run_api_server(self) -> Process:
        command = [
            str(program("kube-apiserver")),
            f"--etcd-servers={_ETCD}",
            f"--bind-address={Network.ADDRESS}",
            f"--advertise-address={Network.ADDRESS}",
            f"--secure-port={_API_PORT}",
            f"--cert-dir={self.folder / 'certs'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={self.folder / 'accounts.pub'}",
            f"--service-account-signing-key-file={self.folder / 'accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--default-unreachable-toleration-seconds=1",
            "--default-not-ready-toleration-seconds=1",
            "--watch-cache=true",
            "--profiling=false",
        ]
        return self.run("kube-apiserver", command)

    def _client(self, api_server: Process) -> Kube:
        api_server.wait_for(self.authority.exists, READY_SECONDS)
        made: list[Kube] = []

        def ready() -> bool:
            try:
                tls = ssl.create_default_context(cafile=str(self.authority))
                kube = Kube(self.network, Network.ADDRESS, _API_PORT, tls, self.admin_token)
                kube.request("GET", "/readyz")
                kube.get("Namespace", None, "default")
            except (OSError, ApiError):
                return False
            made.append(kube)
            return True

        api_server.wait_for(ready, READY_SECONDS)
        return made[0]

    def _run_controller_manager(self) -> Process:
        command = [
            str(program("kube-controller-manager")),
            f"--kubeconfig={self.kubeconfig()}",
            f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            f"--root-ca-file={self.authority}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            f"--controllers={','.join(_CONTROLLERS)}",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=24h",  # nobody sends heartbeats: a test breaks a node by writing its status
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            "--secure-port=0",
            "--profiling=false",
        ]
        return self.run("kube-controller-manager", command)

    def _run_scheduler(self) -> Process:
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig()), "qps": 1000, "burst": 2000},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
        }
        path = self.folder / "scheduler.yaml"
        path.write_text(json.dumps(config))
        return self.run("kube-scheduler", [str(program("kube-scheduler")), f"--config={path}", "--secure-port=0"])

    def _run_kwok(self) -> Process:
        command = [
            str(program("kwok")),
            f"--kubeconfig={self.kubeconfig()}",
            "--manage-all-nodes=true",
            "--enable-crds=Stage",
            "--node-lease-duration-seconds=0",
            f"--node-ip={Network.ADDRESS}",
            "--cidr=10.88.0.0/16",
            "--server-address=127.0.0.1:10247",
        ]
        return self.run("kwok", command)

    def _install_kuberay_crds(self, version: str) -> None:
        if version == self._crds_version:
            return
        crds = _crds(files(f"ray-operator-{version}", "crds"), "")
        for crd in crds:
            self._install(crd)
        for crd in crds:
            self._wait_established(crd["metadata"]["name"])
        self._crds_version = version

    def _install(self, crd: dict[str, Any]) -> None:
        """Create or replace: server-side apply takes the API server seconds with schemas of this size."""
        name = crd["metadata"]["name"]
        old = self.kube.find("CustomResourceDefinition", None, name)
        if old is None:
            self.kube.create(crd)
            return
        metadata = {**crd["metadata"], "resourceVersion": old["metadata"]["resourceVersion"]}
        path = self.kube.path("CustomResourceDefinition", None, name)
        self.kube.request("PUT", path, {**crd, "metadata": metadata})

    def _wait_established(self, name: str) -> None:
        self.kube.wait_for(
            "CustomResourceDefinition",
            None,
            name,
            lambda crd: conditions(crd).get("Established", {}).get("status") == "True",
        )

    def _http_ok(self, port: int, path: str) -> bool:
        client = Kube(self.network, "127.0.0.1", port, None, "")
        try:
            client.request("GET", path)
        except (OSError, ApiError):
            return False
        return True


def _crds(folder: Path, plural: str) -> list[dict[str, Any]]:
    return [_read_yaml(path) for path in sorted(folder.glob(f"*{plural}.yaml"))]


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of the programs' cache; a megabyte of YAML takes seconds, so its JSON is kept beside it."""
    kept = path.with_suffix(".json")
    if not kept.exists():
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(yaml.safe_load(path.read_text())))
        new.rename(kept)
    content: dict[str, Any] = json.loads(kept.read_text())
    return content


def _stages() -> list[dict[str, Any]]:
    """kwok's own stages, changed so that tests can hold a pod back and break a node."""
    folder = files("kwok", "kustomize") / "stage"
    stages = [
        yaml.safe_load((folder / name).read_text())
        for name in ("node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml")
    ]
    for stage, annotation in zip(stages, (LOST, HOLD)):
        unless = {"key": f'.metadata.annotations["{annotation}"]', "operator": "DoesNotExist"}
        stage["spec"]["selector"]["matchExpressions"].append(unless)
    return stages


def unique(prefix: str) -> str:
    """Return a name that was not there before."""
    return f"{prefix}-{int(time.time() * 1000) % 10**9}-{secrets.token_hex(2)}"
