"""Nodes of a Ray cluster that hold the job's devices, and the placement group that reserves them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rljob_api import RLJobSpec, derived
from rljob_api.derived import NodeGroup
from rljob_api.how_many import how_many
from rljob_api.spec import TrainingSpec
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.upstream.ray_types import NodeTable

_NODE_LABEL = "ray.io/node-id"
"""Label that Ray itself gives every node: its id."""
_GROUP_LABEL = "ray.io/node-group"
"""Label that Ray gives a node of a KubeRay worker group: the group's name."""
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
    """Devices of the job's kind; 0 where CPUs stand for devices."""

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True, slots=True)
class Spot:
    """Spot of a process: a bundle of reserved devices."""

    group: PlacementGroup
    bundle: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The reserved devices, numbered node by node; bundle `i` is device `i`."""

    group: PlacementGroup
    nodes: tuple[Node, ...]
    holds: tuple[NodeGroup, ...]
    """Groups that each node holds."""

    def trainers(self, training: TrainingSpec) -> list[int]:
        """The job's device that each trainer runs on, by rank, as `ParallelLayout.nodes` deals them; empty for engines
        alone."""
        devices = [device for first, own in self._each() for device in range(first, first + own.trainers)]
        if not devices:
            return []
        layout = ParallelLayout.of_training(training, len(devices))
        ranks = chain.from_iterable(layout.nodes(max(own.trainers for own in self.holds)))
        return [device for _, device in sorted(zip(ranks, devices, strict=True))]

    def engines(self, size: int) -> list[range]:
        """The job's devices that each engine of so many devices spans."""
        spans = [(first + own.first_engine_device, own.engine_devices) for first, own in self._each()]
        return [
            range(start, start + size)
            for first, devices in spans
            for start in range(first, first + devices - size + 1, size)
        ]

    def judges(self) -> list[range]:
        """The job's device of each process of a judge: those that it has to itself, or all that engines span."""
        own = [
            range(device, device + 1)
            for first, own in self._each()
            for device in range(first + own.devices - own.judge_devices, first + own.devices)
        ]
        return own or self.engines(1)

    def spot(self, device: int) -> Spot:
        """Spot at which a device is reserved."""
        return Spot(self.group, device)

    def node_of(self, device: int) -> int:
        """Position in `nodes` of the node that holds a device of the job."""
        return max(node for node, (first, _) in enumerate(self._each()) if first <= device)

    def number_on_node(self, device: int) -> int:
        """Number of a device of the job among those of its node."""
        return device - self.first_device(self.node_of(device))

    def first_device(self, node: int) -> int:
        """The job's first device on a node."""
        return self._each()[node][0]

    def _each(self) -> list[tuple[int, NodeGroup]]:
        """For each node its first device and what it holds."""
        firsts = accumulate((own.devices for own in self.holds), initial=0)
        return list(zip(firsts, self.holds, strict=False))


def engines_alone(spec: RLJobSpec) -> tuple[NodeGroup, ...]:
    """The job's nodes with the devices of its engines and no trainers."""
    return tuple(
        replace(own, devices=own.engine_devices, trainers=0, first_engine_device=0)
        for own in without_judges(derived.node_groups(spec))
        if own.engine_devices
    )


def without_judges(groups: Sequence[NodeGroup]) -> tuple[NodeGroup, ...]:
    """The same nodes without the devices that are a judge's alone."""
    return tuple(replace(own, devices=own.devices - own.judge_devices, judge_devices=0) for own in groups)


def bundle_cpus(spec: RLJobSpec) -> int:
    """CPUs that one device reserves in Ray."""
    return spec.resources.threads_per_device or 1


def capable_nodes(spec: RLJobSpec, own: NodeGroup, table: Sequence[NodeTable]) -> list[Node]:
    """Living nodes of `ray.nodes()` that can hold what a node of a group does, in a stable order.

    A head that was started without CPUs is none of them, nor is a node that says it is of another group.
    """
    resource = device_kind(spec.resources).ray_resource
    devices = own.devices if resource else 0
    others = {group.name for group in derived.node_groups(spec)} - {own.name}
    not_its = {n["NodeID"] for n in table if n["Labels"].get(_GROUP_LABEL) in others}
    return [
        node
        for node in living_nodes(table, resource)
        if node.cpus >= own.devices * bundle_cpus(spec) and node.devices >= devices and node.id not in not_its
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


def idle_first(
    spec: RLJobSpec, own: NodeGroup, nodes: Sequence[Node], available: Mapping[str, Mapping[str, float]]
) -> list[Node]:
    """The same nodes, those first that have what a node of a group holds free now; Ray's own figures, some moments
    old."""
    resource = device_kind(spec.resources).ray_resource
    wanted = {"CPU": own.devices * bundle_cpus(spec)} | ({resource: own.devices} if resource else {})

    def busy(node: Node) -> bool:
        free = available.get(node.id, {})
        return any(free.get(name, 0.0) < amount for name, amount in wanted.items())

    return sorted(nodes, key=busy)


def _candidates(spec: RLJobSpec, groups: Sequence[NodeGroup]) -> list[tuple[NodeGroup, list[Node]]]:
    """For each group the nodes that can hold it, idle ones first; no node for two of them."""
    table, available = ray.nodes(), available_resources_per_node()
    taken: set[str] = set()
    found = []
    for own in groups:
        able = [node for node in capable_nodes(spec, own, table) if node.id not in taken]
        able = idle_first(spec, own, able, available)
        taken |= {node.id for node in able[: own.nodes]}
        found.append((own, able))
    return found


def reserve_devices(
    spec: RLJobSpec, stop: threading.Event, *, more_may_join: bool, groups: Sequence[NodeGroup] | None = None
) -> Placement:
    """Reserve the devices of each of the job's nodes, waiting for nodes that have yet to join.

    Where the job may begin with fewer nodes with engines than it wants, the others are waited for a moment only.

    Args:
        spec: the job.
        stop: set when the job was asked to stop.
        more_may_join: whether nodes may join yet.
        groups: what its nodes hold; None: trainers and engines.

    Raises:
        UserError: no node can join, and those that are there have too few devices.
        JobError: they are not to be had within `timeouts.startSeconds`; says which nodes there are.
        StopRequested: the job was asked to stop meanwhile.
    """
    groups = derived.node_groups(spec) if groups is None else groups
    deadline = time.monotonic() + spec.timeouts.start_seconds
    others_until = time.monotonic() + _CHOICE_SECONDS
    while True:
        candidates = _candidates(spec, groups)
        chosen = [(own, node) for own, able in candidates for node in able[: own.nodes]]
        complete = len(chosen) == sum(own.nodes for own in groups)
        enough = all(len(able) >= derived.node_bounds(spec, own)[0] for own, able in candidates)
        if complete or not enough:
            others_until = time.monotonic() + _CHOICE_SECONDS
        enough = complete or (enough and time.monotonic() >= others_until)
        if not enough and not more_may_join:
            raise UserError(_lack(spec, groups[0], ray.nodes()))
        if enough:
            holds, nodes = tuple(own for own, _ in chosen), tuple(node for _, node in chosen)
            group = _group(spec, chosen)
            # With others to choose from, a node that is busy after all is not waited for until the deadline.
            choice = any(len(able) > own.nodes for own, able in candidates)
            until = min(deadline, time.monotonic() + _CHOICE_SECONDS) if choice else deadline
            if _reserved(group, nodes, stop, until):
                return Placement(group, nodes, holds)
            remove_placement_group(group)
        if stop.is_set():
            raise StopRequested
        if time.monotonic() > deadline:
            raise JobError(_shortage(spec, groups, ray.nodes()))
        stop.wait(_POLL_SECONDS)


def reserve_engine(spec: RLJobSpec, stop: threading.Event) -> tuple[PlacementGroup, Node] | None:
    """Reserve the devices of one engine on a node that has them free, waiting for one; None when stopped."""
    size, own = spec.rollout.tensor_parallel, derived.node_groups(spec)[-1]
    needed = replace(own, devices=size)
    while not stop.is_set():
        able = capable_nodes(spec, needed, ray.nodes())
        for node in idle_first(spec, needed, able, available_resources_per_node())[:1]:
            group = _group(spec, [(needed, node)])
            if _reserved(group, [node], stop, time.monotonic() + _CHOICE_SECONDS):
                return group, node
            remove_placement_group(group)
        stop.wait(_POLL_SECONDS)
    return None


def _group(spec: RLJobSpec, chosen: Sequence[tuple[NodeGroup, Node]]) -> PlacementGroup:
    """One bundle a device, each tied to its node: PACK alone would fill a large node before it takes the next."""
    selectors = [{_NODE_LABEL: node.id} for own, node in chosen for _ in range(own.devices)]
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


def _shortage(spec: RLJobSpec, groups: Sequence[NodeGroup], table: Sequence[NodeTable]) -> str:
    wanted = " and ".join(f"{how_many(own.nodes, 'node')} with {_wanted(spec, own)} each" for own in groups)
    return (
        f"start: {wanted} (spec.resources) were not to be had within {spec.timeouts.start_seconds:g} s "
        f"(spec.timeouts.startSeconds); the Ray cluster's nodes: {_there(spec, table)}"
    )


def _lack(spec: RLJobSpec, own: NodeGroup, table: Sequence[NodeTable]) -> str:
    variable = device_kind(spec.resources).visible_variable
    shown = f" ({variable}={os.environ[variable]} in this shell)" if variable and variable in os.environ else ""
    wanted = _wanted(spec, own)
    return f"spec.resources.devicesPerNode: the job needs {wanted}; this machine is {_there(spec, table)}{shown}"


def _wanted(spec: RLJobSpec, own: NodeGroup) -> str:
    resource = device_kind(spec.resources).ray_resource
    cpus = f"{own.devices * bundle_cpus(spec)} free CPUs"
    return cpus + (f" and {own.devices} free {resource}" if resource else "")


def _there(spec: RLJobSpec, table: Sequence[NodeTable]) -> str:
    resource = device_kind(spec.resources).ray_resource
    has = [
        f"{node} with {node.cpus:g} CPUs" + (f" and {node.devices:g} {resource}" if resource else "")
        for node in living_nodes(table, resource)
    ]
    return ", ".join(has) or "none"
