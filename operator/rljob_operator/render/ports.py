"""Ports that Ray's processes of a worker pod listen on.

In the node's network the pods of a server share its ports. A job's trainers and engines, whose pods may share a server,
have ports of their own; pods with the same ports (two jobs) are kept on different servers by the scheduler, for they
declare them. Ray's other ports are free ones that the system picks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api import derived
from rljob_api.derived import NodeGroup
from rljob_api.json_types import Json
from rljob_api.ray_ports import worker_ports
from rljob_api.spec import RLJobSpec
from rljob_operator.render.settings import RenderSettings

_METRICS = 8080
"""KubeRay's default (DefaultMetricsPort)."""


@dataclass(frozen=True, slots=True)
class RayPorts:
    """Ports of the pods of a group."""

    agent: int
    """Port of Ray's agent, which answers the probes."""
    metrics: int
    workers: tuple[int, int]
    """First and last of Ray's worker processes."""
    in_node_network: bool
    """Other pods of the server have the same network."""

    def start_parameters(self) -> dict[str, str]:
        """Parameters of `ray start`."""
        parameters = {"dashboard-agent-listen-port": str(self.agent)}
        if self.in_node_network:
            parameters["metrics-export-port"] = str(self.metrics)
            parameters["min-worker-port"], parameters["max-worker-port"] = map(str, self.workers)
        return parameters

    def declared(self) -> list[Json]:
        """`ports` of the Ray container: the scheduler lets no other pod with one of them onto the server."""
        if not self.in_node_network:
            return []
        return [
            {"name": "metrics", "containerPort": self.metrics},
            {"name": "agent", "containerPort": self.agent},
        ]


def ray_ports(spec: RLJobSpec, settings: RenderSettings, group: NodeGroup) -> RayPorts:
    """Ports of a group's pods."""
    groups = derived.node_groups(spec)
    on_node = spec.network.host_network
    place = [one.name for one in groups].index(group.name) if on_node else 0
    return RayPorts(settings.agent_port + place, _METRICS + place, worker_ports(place), on_node)
