"""Scheduling of the pods: queues, gangs, selectors, tolerations, affinity.

Sources: KubeRay's volcano_scheduler.go (labels that it reads, annotations that it copies to the PodGroup from 1.6 on);
Kueue's integration of RayCluster; MindCluster's documentation, "Pod" and "PodGroup" labels and annotations (7.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_api import derived
from rljob_api.derived import WORKER_GROUP, NodeGroup
from rljob_api.json_types import Json
from rljob_api.kubernetes_names import is_label_value
from rljob_api.profiles import HardwareProfile
from rljob_api.queue_label import QUEUE_LABEL
from rljob_api.spec import QueueSystem, RLJobSpec

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_GANGS = (QueueSystem.VOLCANO, QueueSystem.MIND_CLUSTER)


def cluster_labels(spec: RLJobSpec) -> dict[str, str]:
    """Labels of the RayCluster that queueing systems read."""
    scheduling = spec.scheduling
    if scheduling.system is QueueSystem.KUEUE:
        return {QUEUE_LABEL: scheduling.queue or ""}
    if scheduling.system not in _GANGS:
        return {}
    labels = {} if scheduling.queue is None else {"volcano.sh/queue-name": scheduling.queue}
    if scheduling.priority_class is not None and is_label_value(scheduling.priority_class):
        labels["ray.io/priority-class-name"] = scheduling.priority_class
    return labels


def passed_labels(labels: Mapping[str, str], prefixes: Sequence[str]) -> dict[str, str]:
    """Labels of the RLJob that its RayCluster gets too.

    Labels without a prefix are the user's own (Kubernetes' convention). Those with one belong to some program, which
    may take the RayCluster for an object of its own (Argo CD deletes what carries its label and is not in Git), so that
    the administrator names the prefixes.
    """
    return {key: value for key, value in labels.items() if "/" not in key or key.partition("/")[0] in prefixes}


def cluster_annotations(spec: RLJobSpec, profile: HardwareProfile) -> dict[str, str]:
    """Annotations of the RayCluster: KubeRay hands them to Volcano's PodGroup. The pods get them too."""
    mind_cluster = profile.mind_cluster
    if spec.scheduling.system is not QueueSystem.MIND_CLUSTER or mind_cluster is None:
        return {}
    annotations = {"huawei.com/schedule_minAvailable": str(derived.nodes(spec) + 1)}
    if mind_cluster.schedule_policy is not None and spec.scheduling.super_pod_block is None:
        annotations["huawei.com/schedule_policy"] = mind_cluster.schedule_policy
    if spec.scheduling.super_pod_block is not None:
        annotations["sp-block"] = str(spec.scheduling.super_pod_block)
    return annotations


def pod_labels(spec: RLJobSpec, profile: HardwareProfile) -> dict[str, str]:
    """Labels that MindCluster requires on its pods; KubeRay hands none of the RayCluster's on."""
    known = profile.mind_cluster
    if spec.scheduling.system is not QueueSystem.MIND_CLUSTER or known is None or known.ring_controller is None:
        return {}
    return {"ring-controller.atlas": known.ring_controller}


def pod_annotations(spec: RLJobSpec, profile: HardwareProfile, *, head: bool) -> dict[str, str]:
    """Annotations of head or worker pods."""
    annotations = cluster_annotations(spec, profile)
    if spec.scheduling.system in _GANGS and spec.scheduling.queue is not None:
        annotations["scheduling.volcano.sh/queue-name"] = spec.scheduling.queue
    if head and spec.scheduling.system is QueueSystem.MIND_CLUSTER and profile.mind_cluster is not None:
        # A pod without devices otherwise makes the gang invalid ("npu num must be 2n", "require full node npu").
        annotations["huawei.com/skip-ascend-plugin"] = "enabled"
    return annotations


def placement(spec: RLJobSpec, profile: HardwareProfile, job: str, group: NodeGroup | None) -> dict[str, Json]:
    """Scheduling fields of the pod spec of a group's worker; None: of the head."""
    scheduling = spec.scheduling
    fields: dict[str, Json] = {}
    if scheduling.priority_class is not None:
        fields["priorityClassName"] = scheduling.priority_class
    if scheduling.system in _GANGS:
        fields["schedulerName"] = "volcano"
    if group is None:
        return fields
    selector = {**profile.node_selector, **scheduling.node_selector}
    if selector:
        fields["nodeSelector"] = selector
    if scheduling.tolerations:
        fields["tolerations"] = [
            toleration.model_dump(mode="json", by_alias=True, exclude_none=True)
            for toleration in scheduling.tolerations
        ]
    affinity = _affinity(spec, job, group)
    if affinity:
        fields["affinity"] = affinity
    return fields


def _affinity(spec: RLJobSpec, job: str, group: NodeGroup) -> dict[str, Json]:
    affinity = {key: value for key, value in spec.scheduling.affinity.items() if value is not None}
    if group.nodes == 1:
        return affinity
    # Two workers on one server would see each other as different servers and leave HCCS for RoCE (vllm-ascend 14506).
    # Engines and trainers are in different pods whatever their server.
    labels = {"rljob.dev/job": job, "ray.io/node-type": "worker"}
    if group.name != WORKER_GROUP:
        labels["ray.io/group"] = group.name
    apart = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    given = affinity.get("podAntiAffinity", {})
    return {**affinity, "podAntiAffinity": {**given, _REQUIRED: [*(given.get(_REQUIRED) or []), apart]}}
