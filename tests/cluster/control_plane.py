"""A real Kubernetes control plane in a network namespace of its own."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kube import ApiError, Kube, conditions
from network import Network
from processes import Process
from programs import files, program

READY_SECONDS = 60.0
KUBERAY_VERSIONS = ("1.6.2", "1.5.1")
_API_PORT = 6443
_ETCD = "http://127.0.0.1:2379"


class ControlPlane:
    """etcd, API server, controller manager, scheduler and one KubeRay; `start` to `stop`. Subclasses bring the nodes.

    Args:
        folder: for data, keys and logs; it must be empty.
        crds: manifests of the custom resource definitions to install before the controllers start: the garbage
            collector looks for new kinds only every half minute.
        network: where everything runs; it is closed at the end.
    """

    CONTROLLERS: Sequence[str] = ("*",)
    """Controllers of the controller manager."""
    NODE_GRACE_SECONDS = 40
    """Seconds that a node may be silent."""
    EVICTION_SECONDS = 300
    """Seconds that pods stay on a node that is silent."""

    def __init__(self, folder: Path, crds: Sequence[Mapping[str, Any]], network: Network) -> None:
        self.folder = folder
        self.network = network
        self.server = f"https://{Network.ADDRESS}:{_API_PORT}"
        self._crds = crds
        self.admin_token = secrets.token_urlsafe()
        self.programs: dict[str, Process] = {}
        self._kuberay: tuple[str, Process] | None = None
        self._crds_version = ""
        self.kube: Kube

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything but KubeRay. Raises RuntimeError with the log of what did not start."""
        self._write_keys()
        self._run_etcd()
        self.start_api_server()
        for crd in self._crds:
            self._install(dict(crd))
        self._install_kuberay_crds(KUBERAY_VERSIONS[0])
        for crd in self.kube.list("CustomResourceDefinition"):
            self._wait_established(crd["metadata"]["name"])
        self._run_controller_manager()
        self._run_scheduler()
        self.start_nodes()

    def start_nodes(self) -> None:
        """Bring the nodes, once the rest runs."""
        raise NotImplementedError

    def stop(self) -> None:
        """End everything, the API server before etcd: without its etcd it hangs in its graceful shutdown for good."""
        if self._kuberay is not None:
            self._kuberay[1].kill()
        store = [self.programs.pop(name) for name in ("kube-apiserver", "etcd") if name in self.programs]
        for process in reversed(self.programs.values()):
            process.kill()
        for process in store:
            process.stop(3)
        self.programs, self._kuberay = {}, None
        self.network.close()

    def check(self) -> None:
        """Raise RuntimeError when a program has ended by itself."""
        for process in [*self.programs.values(), *([self._kuberay[1]] if self._kuberay else [])]:
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
        process.wait_for(lambda: self.http_ok(probe, "/readyz"), READY_SECONDS)
        return process

    @property
    def kuberay_version(self) -> str:
        """Version of the KubeRay that runs, or of the one that would be first."""
        return self._kuberay[0].split()[0] if self._kuberay is not None else KUBERAY_VERSIONS[0]

    # --- programs ------------------------------------------------------------------------------

    def run(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a program inside the namespace."""
        return Process(self.network, self.folder, name, command, environment)

    def keep(
        self, name: str, command: list[str], ready: Callable[[], bool], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start one of the cluster's own programs, which must then run to the end, and wait until it is ready."""
        self.programs[name] = self.run(name, command, environment)
        self.programs[name].wait_for(ready, READY_SECONDS)

    def execute(self, *command: str, seconds: float = 120.0, environment: Mapping[str, str] | None = None) -> str:
        """Run a command inside the namespace and return what it printed. Raises RuntimeError when it fails."""
        process = self.network.spawn(command, subprocess.PIPE, {**os.environ, **(environment or {})})
        said, _ = process.communicate(timeout=seconds)
        text = said.decode(errors="replace")
        if process.returncode:
            raise RuntimeError(f"`{' '.join(command)}` ended with {process.returncode}: {text[-10000:]}")
        return text

    def helm(self, *arguments: str, seconds: float = 120.0) -> str:
        """Run helm as the administrator."""
        homes = {f"HELM_{name}_HOME": str(self.folder / "helm" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        command = [str(program("helm")), *arguments, f"--kubeconfig={self.admin}"]
        return self.execute(*command, seconds=seconds, environment=homes)

    @property
    def admin(self) -> Path:
        """Kubeconfig of the administrator."""
        path = self.folder / "kubeconfig"
        if not path.exists():
            self.kubeconfig().rename(path)
        return path

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

    def _run_etcd(self) -> None:
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
        self.keep("etcd", command, lambda: self.http_ok(2379, "/health"))

    def start_api_server(self) -> None:
        """Start it, for the first time or again, and wait until it answers."""
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
            f"--default-unreachable-toleration-seconds={self.EVICTION_SECONDS}",
            f"--default-not-ready-toleration-seconds={self.EVICTION_SECONDS}",
            "--kubelet-preferred-address-types=InternalIP",
            "--watch-cache=true",
            "--profiling=false",
        ]
        self.keep("kube-apiserver", command, self._api_server_ready)

    def _api_server_ready(self) -> bool:
        if not self.authority.exists():
            return False
        try:
            tls = ssl.create_default_context(cafile=str(self.authority))
            kube = Kube(self.network, Network.ADDRESS, _API_PORT, tls, self.admin_token)
            kube.request("GET", "/readyz")
            kube.get("Namespace", None, "default")
        except (OSError, ApiError):
            return False
        self.kube = kube
        return True

    def _run_controller_manager(self) -> None:
        command = [
            str(program("kube-controller-manager")),
            f"--kubeconfig={self.kubeconfig()}",
            f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            f"--root-ca-file={self.authority}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            f"--controllers={','.join(self.CONTROLLERS)}",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={self.NODE_GRACE_SECONDS}s",
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            "--secure-port=0",
            "--profiling=false",
        ]
        self.keep("kube-controller-manager", command, lambda: True)

    def _run_scheduler(self) -> None:
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
        command = [str(program("kube-scheduler")), f"--config={path}", "--secure-port=0"]
        self.keep("kube-scheduler", command, lambda: True)

    def _install_kuberay_crds(self, version: str) -> None:
        if version == self._crds_version:
            return
        self.install_crds(crds_in(files(f"ray-operator-{version}", "crds")))
        self._crds_version = version

    def install_crds(self, crds: Sequence[dict[str, Any]]) -> None:
        """Install or replace CRDs and wait until the API server has their kinds."""
        for crd in crds:
            self._install(crd)
        for crd in crds:
            self._wait_established(crd["metadata"]["name"])

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

    def http_ok(self, port: int, path: str) -> bool:
        """Whether a program on the loopback address answers this with success."""
        client = Kube(self.network, "127.0.0.1", port, None, "")
        try:
            client.request("GET", path)
        except (OSError, ApiError):
            return False
        return True


def crds_in(folder: Path, name: str = "") -> list[dict[str, Any]]:
    """Return the manifests in a folder of the programs' cache whose file names end with `name`."""
    return [_read_yaml(path) for path in sorted(folder.glob(f"*{name}.yaml"))]


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of the programs' cache; a megabyte of YAML takes seconds, so its JSON is kept beside it."""
    kept = path.with_suffix(".json")
    if not kept.exists():
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(yaml.safe_load(path.read_text())))
        new.rename(kept)
    content: dict[str, Any] = json.loads(kept.read_text())
    return content


def unique(prefix: str) -> str:
    """Return a name that was not there before."""
    return f"{prefix}-{int(time.time() * 1000) % 10**9}-{secrets.token_hex(2)}"
