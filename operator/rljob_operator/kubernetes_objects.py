"""Kubernetes objects as JSON: what is sent, and of what is read the fields that are used.

The types of what is read say what the API server promises, whose schemas checked it; nothing checks it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NotRequired, Required, TypeAlias, TypedDict, TypeVar

from rljob_api.json_types import Json, JsonObject

Manifest: TypeAlias = JsonObject
"""An object as it is sent."""


class OwnerReference(TypedDict, total=False):
    """Owner of an object, which is deleted with it."""

    kind: Required[str]
    name: Required[str]
    uid: Required[str]
    controller: bool


class ObjectMeta(TypedDict, total=False):
    """Fields that all objects have."""

    name: Required[str]
    namespace: str
    uid: Required[str]
    generation: int
    resourceVersion: Required[str]
    creationTimestamp: Required[str]
    deletionTimestamp: str
    labels: dict[str, str] | None
    annotations: dict[str, str] | None
    ownerReferences: list[OwnerReference] | None


class KubeObject(TypedDict, total=False):
    """An object of any kind, or what a deletion answers (kind `Status`)."""

    apiVersion: str
    kind: str
    metadata: Required[ObjectMeta]


class Condition(TypedDict, total=False):
    """One of a status."""

    type: Required[str]
    status: str
    reason: str
    message: str
    lastTransitionTime: str


class RLJobObject(KubeObject, total=False):
    """An RLJob as it is stored; its spec need not be valid."""

    specBytes: int
    """Size of a spec that was too large to be kept (not in what the API server sends)."""
    spec: dict[str, Json] | None
    status: dict[str, Json] | None


class AuthOptions(TypedDict, total=False):
    """Access to Ray's API."""

    mode: str
    secretName: str


class WorkerGroup(TypedDict):
    """A group of a RayCluster's worker pods."""

    groupName: str
    replicas: NotRequired[int]


class RayClusterSpec(TypedDict, total=False):
    """Fields of a RayCluster's spec that are read."""

    suspend: bool
    workerGroupSpecs: list[WorkerGroup] | None
    authOptions: AuthOptions | None


class RayHead(TypedDict, total=False):
    """Place of the head."""

    podName: str
    serviceName: str


class RayClusterStatus(TypedDict, total=False):
    """KubeRay's."""

    state: str
    reason: str
    head: RayHead | None
    conditions: list[Condition] | None
    desiredWorkerReplicas: int
    readyWorkerReplicas: int
    observedGeneration: int


class RayClusterObject(KubeObject, total=False):
    """A RayCluster."""

    spec: RayClusterSpec | None
    status: RayClusterStatus | None


class Waiting(TypedDict, total=False):
    """Why a container does not run yet."""

    reason: str
    message: str


class Terminated(TypedDict, total=False):
    """End of a container."""

    exitCode: int
    reason: str
    message: str


class ContainerState(TypedDict, total=False):
    """One of the three."""

    waiting: Waiting
    running: Mapping[str, str]
    terminated: Terminated


class ContainerStatus(TypedDict, total=False):
    """State of a container."""

    name: Required[str]
    state: ContainerState | None
    lastState: ContainerState | None


class NamedContainer(TypedDict):
    """Fields that are read of a pod's containers."""

    name: str


class PodSpec(TypedDict, total=False):
    """Fields of a pod's spec that are read."""

    nodeName: str
    initContainers: list[NamedContainer] | None


class PodStatus(TypedDict, total=False):
    """The kubelet's and the scheduler's."""

    phase: str
    podIP: str
    reason: str
    message: str
    conditions: list[Condition] | None
    initContainerStatuses: list[ContainerStatus] | None
    containerStatuses: list[ContainerStatus] | None


class PodObject(KubeObject, total=False):
    """A pod."""

    spec: PodSpec | None
    status: PodStatus | None


class QueueStatus(TypedDict, total=False):
    """Kueue's of a Workload, Volcano's of a PodGroup."""

    phase: str
    conditions: list[Condition] | None


class QueueObject(KubeObject, total=False):
    """A Workload or PodGroup."""

    status: QueueStatus | None


class ClaimedSandbox(TypedDict, total=False):
    """Sandbox that a claim has."""

    name: str
    podIPs: list[str] | None


class SandboxClaimStatus(TypedDict, total=False):
    """agent-sandbox's."""

    conditions: list[Condition] | None
    sandbox: ClaimedSandbox | None


class SandboxClaimObject(KubeObject, total=False):
    """A SandboxClaim."""

    status: SandboxClaimStatus | None


class SecretObject(KubeObject, total=False):
    """A Secret."""

    data: dict[str, str] | None


class LeaseSpec(TypedDict, total=False):
    """The leader, and until when it holds the lease."""

    holderIdentity: str
    leaseDurationSeconds: int
    acquireTime: str
    renewTime: str
    leaseTransitions: int


class LeaseObject(KubeObject, total=False):
    """A Lease."""

    spec: LeaseSpec | None


class EventSeries(TypedDict, total=False):
    """When the last of many was."""

    lastObservedTime: str


class ObjectReference(TypedDict, total=False):
    """Object of an Event."""

    uid: str


class EventObject(KubeObject, total=False):
    """An Event."""

    reason: str
    message: str
    involvedObject: Required[ObjectReference]
    series: EventSeries | None
    lastTimestamp: str | None
    eventTime: str | None


class NodeStatus(TypedDict, total=False):
    """Fields of a node's status that are read."""

    allocatable: dict[str, str] | None


class NodeObject(KubeObject, total=False):
    """A node."""

    status: NodeStatus | None


Item = TypeVar("Item", bound=KubeObject)
ListMeta = TypedDict("ListMeta", {"resourceVersion": Required[str], "continue": str}, total=False)


class ObjectList(TypedDict, Generic[Item], total=False):
    """A page of a list."""

    metadata: Required[ListMeta]
    items: list[Item] | None


class WatchEvent(TypedDict):
    """One line of a watch; without a type: it comes from a list."""

    type: str | None
    object: KubeObject


class GroupVersion(TypedDict):
    """A version of an API group."""

    version: str


class ApiGroup(TypedDict):
    """The API server's description of a group."""

    versions: list[GroupVersion]
    preferredVersion: GroupVersion


class ApiResource(TypedDict):
    """A kind of a group's version."""

    name: str


class ApiResourceList(TypedDict):
    """The kinds of a group's version."""

    resources: list[ApiResource]


def with_metadata(manifest: Manifest, **fields: str) -> Manifest:
    """The manifest with more in its `metadata`."""
    metadata = manifest["metadata"]
    assert isinstance(metadata, Mapping)
    return {**manifest, "metadata": {**metadata, **fields}}


def block_of(parent: Manifest, field: str) -> Manifest:
    """An object in another; empty where there is none."""
    value = parent.get(field)
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{field} is no mapping")
    return value or {}


def blocks_of(parent: Manifest, field: str) -> list[Manifest]:
    """Objects of a list in an object; none where there is no list."""
    values = parent.get(field)
    if not isinstance(values, list | tuple | None) or not all(isinstance(value, Mapping) for value in values or ()):
        raise TypeError(f"{field} is no list of mappings")
    return list(values or ())
