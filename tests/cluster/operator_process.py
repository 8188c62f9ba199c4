"""The operator as a process, with the settings that let it live beside a test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from control_plane import ControlPlane, unique
from kube import ApiError, Kube
from network import Network
from processes import Process
from ray_standin import RayStandIn
from support.warm.client import WarmProcess
from support.warm.protocol import OPERATOR

READY_SECONDS = 60.0
WHAT_TESTS_NAME = {"hostPaths": ["/"], "serviceAccounts": ["*"], "priorityClasses": ["*"]}
"""The administrator's policy for the jobs of these tests, which have their shared folder on the node."""
REPOSITORY = Path(__file__).parents[2]
_IN_NETWORK = Path(__file__).with_name("operator_in_network.py")


class OperatorProcess:
    """One operator that looks after one namespace, or after all with `namespace` None.

    Args:
        control_plane: where it runs.
        ray: the addresses that it gets for Ray and the drivers.
        namespace: the only one that it watches.
        server: address of the API server, such as a proxy's; default: the API server's own.
        token: its bearer token; default: the administrator.
        settings: further settings by their names in the operator.
        code: the checkout whose operator it is.
        cold: start an interpreter for it, as a user does, instead of forking a process that has imported it.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        ray: RayStandIn,
        namespace: str | None,
        server: str | None = None,
        token: str | None = None,
        settings: Mapping[str, str] | None = None,
        code: Path = REPOSITORY,
        cold: bool = False,
    ) -> None:
        self._control_plane = control_plane
        self._cold = cold or code != REPOSITORY
        self._name = unique("operator")
        self._port = control_plane.network.free_port()
        self._environment = {
            "KUBECONFIG": str(control_plane.kubeconfig(token, server)),
            "PYTHONPATH": os.pathsep.join(str(code / part) for part in ("crds", "operator")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        named = {
            "ray_address": ray.ray_address,
            "driver_address": ray.driver_address,
            "http_host": "127.0.0.1",
            "http_port": str(self._port),
            "namespaces": namespace or "",
            "operator_namespace": "default",
            "lease_name": self._name,
            "identity": self._name,
            "kuberay_version": control_plane.kuberay_version,
            "policy": json.dumps(WHAT_TESTS_NAME),
            **(settings or {}),
        }
        self._environment |= {f"RLJOB_{key.upper()}": value for key, value in named.items()}
        self.process: Process

    def start(self) -> None:
        """Start it and wait until its caches are filled; may be called again after its end."""
        self.spawn()
        self.process.wait_for(self.ready, READY_SECONDS)

    def spawn(self) -> None:
        """Start it without waiting."""
        command = [sys.executable, "-m", "rljob_operator.main"] if self._cold else [str(_IN_NETWORK)]
        kind = Process if self._cold else _Forked
        plane = self._control_plane
        self.process = kind(plane.network, plane.folder, self._name, command, self._environment)

    def ready(self) -> bool:
        """Whether `/readyz` says so."""
        try:
            self.http("/readyz")
        except (OSError, ApiError):
            return False
        return True

    def http(self, path: str) -> str:
        """Read from its endpoint."""
        answer = Kube(self._control_plane.network, "127.0.0.1", self._port, None, "").request("GET", path)
        return answer if isinstance(answer, str) else str(answer)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def stop(self) -> int:
        """SIGTERM; return its exit status."""
        return self.process.stop()


class _Forked(Process):
    """A fork of a process that has imported the operator, which takes longer than many a life here."""

    def _start(self, network: Network, command: Sequence[str], environment: dict[str, str]) -> WarmProcess:
        own = network.descriptor
        return WarmProcess(OPERATOR, [*command, str(own)], environment, self.log, passed=[own], append=True)
