"""A control plane with a real node: kubelet, containerd and runc run real pods on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from control_plane import ControlPlane
from images import PAUSE_IMAGE, pause_image
from kube import ApiError, conditions, wait_until
from machine import Machine
from network import Network
from programs import program

NODE = "node-1"
NODE_SECONDS = 90.0
_POD_NETWORK = "10.88.0.0/24"
_CONTAINERD = "/run/containerd/containerd.sock"
_CGROUPS = Path("/sys/fs/cgroup")
_WEIGHTS = {"cpu.shares": 3 * 1024, "cpu.weight": 3 * 100}
"""Weights of version 1 and of version 2; three times a group's default. The tests beside are nice
(support/lanes.py), each of their processes weighs half of one: at eight times they had a tenth of the processors,
and their Ray did not start."""
_NEEDED = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "nft": "nftables", "buildah": "buildah",
    "debootstrap": "debootstrap", "prometheus": "prometheus",
}  # fmt: skip
"""Commands and the Debian packages that they are in."""


def missing_for_nodes() -> str:
    """Return what this machine lacks for a real node, as a sentence, or an empty string."""
    packages = {package for command, package in _NEEDED.items() if shutil.which(command) is None}
    if not Path("/usr/lib/cni/bridge").exists():
        packages.add("containernetworking-plugins")
    return f"Tests on a real node need the packages {', '.join(sorted(packages))}." if packages else ""


class NodeCluster(ControlPlane):
    """One node, its pods in a network of their own behind it, names and services as in any cluster.

    Args:
        folder: as in ControlPlane.
        crds: as in ControlPlane.
        lasting: outlive this process.
    """

    def __init__(self, folder: Path, crds: Sequence[Mapping[str, Any]], lasting: bool = False) -> None:
        self.machine = Machine(folder, lasting)
        super().__init__(folder, crds, self.machine)
        self._cgroup = f"rljob-{self.machine.pid}"

    def start_nodes(self) -> None:
        """Start containerd, kubelet, names and services, and wait until the node takes pods."""
        self._write_files()
        self._make_cgroups()
        self.keep("containerd", ["containerd", "-c", str(self.folder / "containerd.toml")], self._containerd_ready)
        self.load_image(pause_image())
        self.start_kubelet()
        self.keep("coredns", [str(program("coredns")), "-conf", str(self.folder / "Corefile")], lambda: True)
        proxy = [str(program("kube-proxy")), "--config", str(self.folder / "kube-proxy.json")]
        self.keep("kube-proxy", proxy, lambda: self.http_ok(10256, "/healthz"))
        if not wait_until(self._node_ready, NODE_SECONDS):
            raise RuntimeError(f"The node was not ready after {NODE_SECONDS:.0f} s (logs: {self.folder})")

    def start_kubelet(self) -> None:
        """Start kubelet, for the first time or again; pods outlive it."""
        command = [
            str(program("kubelet")),
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={self.kubeconfig()}",
            f"--node-ip={Network.ADDRESS}",
            f"--hostname-override={NODE}",
        ]
        self.keep("kubelet", command, lambda: self.http_ok(10248, "/healthz"))

    def load_image(self, archive: Path) -> None:
        """Give the node an image from a docker-archive file."""
        done = self.execute("ctr", "--address", _CONTAINERD, "--namespace", "k8s.io", "images", "import", str(archive))
        if "unpacking" not in done:
            raise RuntimeError(f"containerd did not take {archive}: {done}")

    def kubectl(self, *arguments: str, seconds: float = 120.0) -> str:
        """Run kubectl as the administrator; `rljob` is the plugin of this environment."""
        paths = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
        environment = {"KUBECONFIG": str(self.admin), "PATH": paths}
        return self.execute(str(program("kubectl")), *arguments, seconds=seconds, environment=environment)

    def stop(self) -> None:
        """End all pods and programs at once."""
        super().stop()
        remove_cgroups(self._cgroup)

    def _containerd_ready(self) -> bool:
        try:
            self.execute("ctr", "--address", _CONTAINERD, "--connect-timeout", "1s", "version", seconds=5)
        except RuntimeError:
            return False
        return True

    def _node_ready(self) -> bool:
        try:
            node = self.kube.get("Node", None, NODE)
        except ApiError:
            return False
        return conditions(node).get("Ready", {}).get("status") == "True"

    def _make_cgroups(self) -> None:
        for hierarchy in _hierarchies():
            (hierarchy / self._cgroup).mkdir(exist_ok=True)
            for given in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / given).exists():
                    (hierarchy / self._cgroup / given).write_text((hierarchy / given).read_text())
            # Its pods have the processor before the tests beside them: those count by process, all pods as one.
            for weight, most in _WEIGHTS.items():
                if (file := hierarchy / self._cgroup / weight).exists():
                    file.write_text(str(most))

    def _write_files(self) -> None:
        def write(name: str, content: dict[str, Any]) -> None:
            (self.folder / name).write_text(json.dumps(content, indent=1))

        (self.folder / "cni").mkdir()
        write("cni/10-bridge.conflist", _cni(self.folder))
        write("kubelet.json", _kubelet(self._cgroup))
        write("kube-proxy.json", _kube_proxy(self.kubeconfig()))
        (self.folder / "containerd.toml").write_text(_containerd(self.folder))
        (self.folder / "Corefile").write_text(_corefile(self.server, self.kubeconfig()))


def remove_cgroups(name: str) -> None:
    """Remove the groups of a node whose processes are gone."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)


def _hierarchies() -> list[Path]:
    """The roots of cgroup version 1, or the one of version 2."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink()]


def _cni(folder: Path) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "cni-addresses"),
        "ranges": [[{"subnet": _POD_NETWORK}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "rljob", "plugins": [bridge]}


def _containerd(folder: Path) -> str:
    # Where root lacks CAP_SYS_RESOURCE, runc cannot lower the OOM score of a pod's first process.
    return f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{_CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


def _kubelet(cgroup: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [Network.ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
        "podLogsDir": "/var/log/pods",
        "failSwapOn": False,
        # A pod's limits would leave a trainer half of one of this machine's two cores.
        "cpuCFSQuota": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "enforceNodeAllocatable": [],
        "nodeStatusUpdateFrequency": "4s",
    }


def _kube_proxy(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": _POD_NETWORK,
        "mode": "nftables",
        "hostnameOverride": NODE,
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _corefile(server: str, kubeconfig: Path) -> str:
    return f""".:53 {{
  bind {Network.ADDRESS}
  errors
  kubernetes cluster.local {{
    endpoint {server}
    kubeconfig {kubeconfig} test
  }}
}}
"""
