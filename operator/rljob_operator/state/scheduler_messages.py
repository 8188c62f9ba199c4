"""Meaning of the schedulers' and queueing systems' messages for an RLJob, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rljob_api import derived
from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_operator.state.causes import Cause
from rljob_operator.state.observed import PodRole, QueueView

_EXTENDED = re.compile(r"Insufficient ([a-z0-9.-]+/\w[\w.-]*\w)")
_ORDINARY = re.compile(r"Insufficient (cpu|memory|ephemeral-storage)")
_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')

_RULES: tuple[tuple[str, str, str], ...] = (
    (
        r"unbound immediate PersistentVolumeClaims|didn't find available persistent volumes|volume node affinity",
        "VolumeNotBound",
        "look at the claims of spec.storage.volumes with `kubectl get pvc`: one is not bound, or its volume is "
        "out of the nodes' reach",
    ),
    (
        r"queue resource quota insufficient",
        "QueueQuota",
        "it waits until other jobs of its Volcano queue end, or the queue's capability is raised",
    ),
    (
        r"didn't match Pod's node affinity|didn't match node selector|didn't match scheduler-enforced node affinity",
        "NodeSelector",
        "no node has the labels that spec.scheduling.nodeSelector, spec.scheduling.affinity and the profile's node "
        "selector (spec.resources.overrides.nodeSelector replaces it) ask for",
    ),
    (r"taint", "Taint", "tolerate the taint in spec.scheduling.tolerations, or take it off the nodes"),
    (r"node\(s\) were unschedulable", "NodesCordoned", "`kubectl uncordon` the nodes"),
    (
        r"didn't have free ports",
        "PortsTaken",
        "with spec.network.hostNetwork only one such pod fits on a node: turn it off, or free the ports",
    ),
    (
        r"anti-affinity|topology spread",
        "PodAffinity",
        "relax spec.scheduling.affinity, or add nodes",
    ),
    (r"Too many pods", "TooManyPods", "the nodes run as many pods as their kubelets allow: add nodes"),
    (r"no nodes available", "NoNodes", "the cluster has no node: add one"),
)
_KUEUE: Mapping[str, str] = {
    "Pending": "it runs when other jobs of the queue end or the quota is raised",
    "WaitingForQuota": "it runs when other jobs of the queue end or the quota is raised",
    "WaitingForPreemptedWorkloads": "it runs when the jobs that it preempts have ended",
    "ExceedsMaxQuota": "it can never run there: ask for less in spec.resources, or for another spec.scheduling.queue",
    "Inadmissible": "correct spec.scheduling.queue, or make the queue",
    "Misconfigured": "correct spec.scheduling.queue, or make the queue",
    "Suspended": "the queue is stopped: its administrator has to start it",
    "NoMatchingFlavor": "no resource flavor of the queue fits spec.scheduling.nodeSelector and tolerations",
    "TopologyPlacementFailed": "no part of the topology has room for the whole job",
    "UnsatisfiedAdmissionChecks": "an admission check of the queue is not ready",
    "Evicted": "it was evicted and is queued again",
    "Preempted": "a job of higher priority took its place; it is queued again",
}
_VOLCANO: Mapping[str, str] = {
    "JobEnqueueFailed": "it waits until its queue (spec.scheduling.queue) has room",
    "JobValidateFailed": "Volcano's Ascend plugin refuses the shape of the job: check spec.resources.devicesPerNode, "
    "spec.resources.nodes and spec.scheduling.superPodBlock against the nodes",
    "NodePredicateFailed": "Volcano's Ascend plugin refuses every node: check the nodes' accelerator-type labels, the "
    "health of their devices and spec.resources.profile",
    "BatchOrderFailed": "no set of nodes has the devices free in the topology that the job asks for",
    "NotEnoughResources": "a gang starts only when there is room for all of its pods at once",
    "NotEnoughTasks": "KubeRay has not made all pods of the gang yet",
    "NotEnoughPodsOfTask": "KubeRay has not made all pods of the gang yet",
}


def no_node(
    message: str, spec: RLJobSpec, role: PodRole, node_devices: Mapping[str, int] | None = None
) -> Cause | None:
    """Read a message of kube-scheduler or Volcano about a pod that fits nowhere; None when it says nothing known.

    A node is tested for taints and labels before its resources (the order of kube-scheduler's filters), so where any
    node is `Insufficient`, that is what stands between the pod and a node.
    """
    if claim := _NO_CLAIM.search(message):
        return Cause("VolumeClaimMissing", f"make the claim {claim[1]}, or correct spec.storage.volumes")
    if device := _EXTENDED.search(message):
        return _no_device(device[1], spec, node_devices)
    if amount := _ORDINARY.search(message):
        what = amount[1] if amount[1] in ("cpu", "memory") else "the pod template's requests"
        field = f"spec.resources.{role}.{what}" if amount[1] in ("cpu", "memory") else f"spec.pods.{role}"
        return Cause("InsufficientResources", f"lower {field}, or wait until other pods give back their {amount[1]}")
    found = [(reason, text) for pattern, reason, text in _RULES if re.search(pattern, message)]
    return Cause(found[0][0], "; ".join(text for _, text in found)) if found else None


def _no_device(resource: str, spec: RLJobSpec, node_devices: Mapping[str, int] | None) -> Cause:
    """kube-scheduler says the same whether the devices are taken or no node has ever had one."""
    asked = derived.devices_per_node(spec)
    if node_devices is None:
        return Cause(
            "InsufficientDevices",
            f"either no node with {asked} of {resource} free is left, or no node offers that resource: compare with "
            "`kubectl describe nodes`",
        )
    largest = node_devices.get(resource, 0)
    if not largest:
        offered = ", ".join(sorted(name for name, count in node_devices.items() if count)) or "no devices at all"
        return Cause(
            "NoSuchResource",
            f"no node offers {resource} (the nodes offer {offered}): choose the spec.resources.profile or "
            "spec.resources.overrides.resourceName that fits, or look at the device plugin",
        )
    if largest < asked:
        return Cause(
            "NodeTooSmall",
            f"spec.resources.devicesPerNode asks for {asked} of {resource} on one node and the largest node has "
            f"{largest}: use more nodes with at most {largest} each",
        )
    return Cause("DevicesTaken", f"it runs when other pods give back their {resource}")


def not_admitted(queue: QueueView, spec: RLJobSpec, node_devices: Mapping[str, int] | None = None) -> Cause:
    """Read what Kueue or Volcano say of a job that they hold back."""
    if spec.scheduling.system is QueueSystem.KUEUE:
        reason = "ExceedsMaxQuota" if "> maximum capacity" in queue.message else queue.reason
        return Cause(reason or "QuotaPending", _KUEUE.get(reason, "it waits for Kueue"))
    deeper = no_node(queue.message, spec, PodRole.WORKER, node_devices)
    text = _VOLCANO.get(queue.reason, "it waits for Volcano")
    return Cause(queue.reason or "GangPending", f"{text}; {deeper.message}" if deeper else text)
