"""Which nodes of a Ray cluster hold the job's devices, and the placement group that reserves them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rljob_api import RLJobSpec, derived
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.upstream.ray_types import NodeTable

_NODE_LABEL = "ray.io/node-id"
"""Label that Ray itself gives every node: its id."""
_POLL_SECONDS = 0.5
_CHOICE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node: on Kubernetes a pod."""

    id: str
    hostname: str
    address: str
    cpus: float
    devices: float = 0.0
    """Of the job's kind; 0 where CPUs stand for devices."""

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True, slots=True)
class Placement:
    """The reserved devices: bundle `i` is device `i % devices_per_node` of node `i // devices_per_node`.

    Trainers have the first `trainers_per_node` devices of a node. Engines span devices from `first_engine_device` on:
    the same ones, or those after the trainers'.
    """

    group: PlacementGroup
    nodes: tuple[Node, ...]
    devices_per_node: int
    trainers_per_node: int
    first_engine_device: int

    @classmethod
    def of(cls, spec: RLJobSpec, group: PlacementGroup, nodes: Sequence[Node]) -> Placement:
        """A job's placement on these nodes."""
        per_node, trainers = derived.devices_per_node(spec), derived.trainers_per_node(spec)
        return cls(group, tuple(nodes), per_node, trainers, derived.first_engine_device(spec))

    def device_of_trainer(self, rank: int) -> int:
        """The job's device that a trainer runs on."""
        return rank // self.trainers_per_node * self.devices_per_node + rank % self.trainers_per_node

    def devices_of_engine(self, index: int, size: int) -> range:
        """The job's devices that an engine of so many devices spans."""
        engines_per_node = (self.devices_per_node - self.first_engine_device) // size
        node, number = divmod(index, engines_per_node)
        first = node * self.devices_per_node + self.first_engine_device + number * size
        return range(first, first + size)

    def node_of(self, device: int) -> int:
        """Position in `nodes` of the node that holds a device of the job."""
        return device // self.devices_per_node


def check_layout(spec: RLJobSpec) -> None:
    """Refuse layouts in which the trainers of a node do not hold the whole model among them.

    Ranks are numbered node by node. Weights go from trainers to engines inside a node only, so each node needs whole
    replicas. Megatron numbers pipeline stages outermost: with several nodes they would lie on different ones.
    """
    if spec.resources.nodes == 1:
        return
    per_node = derived.trainers_per_node(spec)
    if spec.training.pipeline_parallel > 1:
        raise UserError(
            f"spec.training.pipelineParallel: {spec.training.pipeline_parallel} with {spec.resources.nodes} nodes is "
            "not built in this version, since each node must hold whole copies of the model; use 1, or one node"
        )
    for field, size in (
        ("tensorParallel", spec.training.tensor_parallel),
        ("expertParallel", spec.training.expert_parallel),
    ):
        if per_node % size:
            raise UserError(
                f"spec.training.{field}: {size} does not divide spec.resources.devicesPerNode {per_node}, so a group "
                "would lie on two nodes; each node must hold whole copies of the model"
            )


def bundle_cpus(spec: RLJobSpec) -> int:
    """CPUs that one device reserves in Ray."""
    return spec.resources.threads_per_device or 1


def capable_nodes(spec: RLJobSpec, table: Sequence[NodeTable]) -> list[Node]:
    """Living nodes of `ray.nodes()` that can hold a node's share of the devices, in a stable order.

    A head that was started without CPUs is none of them.
    """
    per_node, resource = derived.devices_per_node(spec), device_kind(spec.resources).ray_resource
    devices = per_node if resource else 0
    return [
        node
        for node in living_nodes(table, resource)
        if node.cpus >= per_node * bundle_cpus(spec) and node.devices >= devices
    ]


def living_nodes(table: Sequence[NodeTable], resource: str | None = None) -> list[Node]:
    """Nodes of `ray.nodes()` that are alive, ordered by name, with how much of `resource` they have."""
    nodes = [
        Node(
            n["NodeID"],
            n["NodeManagerHostname"],
            n["NodeManagerAddress"],
            n["Resources"].get("CPU", 0.0),
            n["Resources"].get(resource, 0.0) if resource else 0.0,
        )
        for n in table
        if n["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.hostname, node.address, node.id))


def idle_first(spec: RLJobSpec, nodes: Sequence[Node], available: Mapping[str, Mapping[str, float]]) -> list[Node]:
    """The same nodes, those first that have a node's share free now; Ray's own figures, some moments old."""
    per_node, resource = derived.devices_per_node(spec), device_kind(spec.resources).ray_resource
    wanted = {"CPU": per_node * bundle_cpus(spec)} | ({resource: per_node} if resource else {})

    def busy(node: Node) -> bool:
        free = available.get(node.id, {})
        return any(free.get(name, 0.0) < amount for name, amount in wanted.items())

    return sorted(nodes, key=busy)


def reserve_devices(spec: RLJobSpec, stop: threading.Event, *, more_may_join: bool) -> Placement:
    """Reserve `devicesPerNode` devices on each of `nodes` nodes, waiting for nodes that have yet to join.

    Raises:
        UserError: no node can join, and those that are there have too few devices.
        JobError: they are not to be had within `timeouts.startSeconds`; says which nodes there are.
        StopRequested: the job was asked to stop meanwhile.
    """
    deadline = time.monotonic() + spec.timeouts.start_seconds
    while True:
        candidates = idle_first(spec, capable_nodes(spec, ray.nodes()), available_resources_per_node())
        nodes = candidates[: spec.resources.nodes]
        if len(nodes) < spec.resources.nodes and not more_may_join:
            raise UserError(_lack(spec, ray.nodes()))
        if len(nodes) == spec.resources.nodes:
            group = _group(spec, nodes)
            # With others to choose from, a node that is busy after all is not waited for until the deadline.
            choice = len(candidates) > len(nodes)
            until = min(deadline, time.monotonic() + _CHOICE_SECONDS) if choice else deadline
            if _reserved(group, nodes, stop, until):
                return Placement.of(spec, group, nodes)
            remove_placement_group(group)
        if stop.is_set():
            raise StopRequested
        if time.monotonic() > deadline:
            raise JobError(_shortage(spec, ray.nodes()))
        stop.wait(_POLL_SECONDS)


def _group(spec: RLJobSpec, nodes: Sequence[Node]) -> PlacementGroup:
    """One bundle a device, each tied to its node: PACK alone would fill a large node before it takes the next."""
    selectors = [{_NODE_LABEL: node.id} for node in nodes for _ in range(derived.devices_per_node(spec))]
    resource = device_kind(spec.resources).ray_resource
    bundles = [{"CPU": float(bundle_cpus(spec))} | ({resource: 1.0} if resource else {}) for _ in selectors]
    return placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)


def _reserved(group: PlacementGroup, nodes: Sequence[Node], stop: threading.Event, deadline: float) -> bool:
    """Wait until the group is placed; False when a node died, a stop was asked for or the deadline passed."""
    wanted = {node.id for node in nodes}
    while not group.wait(_POLL_SECONDS):
        alive = {node.id for node in living_nodes(ray.nodes())}
        if not wanted <= alive or stop.is_set() or time.monotonic() > deadline:
            return False
    return True


def _shortage(spec: RLJobSpec, table: Sequence[NodeTable]) -> str:
    wanted, has = _wanted_and_there(spec, table)
    return (
        f"start: {spec.resources.nodes} node(s) with {wanted} each (spec.resources) were not to be had within "
        f"{spec.timeouts.start_seconds:g} s (spec.timeouts.startSeconds); the Ray cluster's nodes: {has}"
    )


def _lack(spec: RLJobSpec, table: Sequence[NodeTable]) -> str:
    wanted, has = _wanted_and_there(spec, table)
    variable = device_kind(spec.resources).visible_variable
    shown = f" ({variable}={os.environ[variable]} in this shell)" if variable and variable in os.environ else ""
    return f"spec.resources.devicesPerNode: the job needs {wanted}; this machine is {has}{shown}"


def _wanted_and_there(spec: RLJobSpec, table: Sequence[NodeTable]) -> tuple[str, str]:
    per_node, resource = derived.devices_per_node(spec), device_kind(spec.resources).ray_resource
    wanted = f"{per_node * bundle_cpus(spec)} free CPUs" + (f" and {per_node} free {resource}" if resource else "")
    has = [
        f"{node} with {node.cpus:g} CPUs" + (f" and {node.devices:g} {resource}" if resource else "")
        for node in living_nodes(table, resource)
    ]
    return wanted, ", ".join(has) or "none"
