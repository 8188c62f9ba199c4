"""Labels, images, volumes and amounts as the objects have them that Kubernetes makes of a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.job import ObjectMeta, RLJob
from rljob_api.queue_label import QUEUE_LABEL, labelled_queue, queue_conflict
from rljob_api.rules.findings import NAME, Check, Finding, at_least, keys, labels, object_name, unprintable
from rljob_api.spec import PodResources, QueueSystem, RLJobSpec, SchedulingSpec, StorageSpec, VolumeSpec

_VOLUME_SOURCES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "configMap", "csi", "downwardAPI"),
    *("emptyDir", "ephemeral", "fc", "flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs", "hostPath"),
    *("image", "iscsi", "nfs", "persistentVolumeClaim", "photonPersistentDisk", "portworxVolume", "projected"),
    *("quobyte", "rbd", "scaleIO", "secret", "storageos", "vsphereVolume"),
)
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
_HOST = "(localhost|([A-Za-z0-9-]+[.])+[A-Za-z0-9-]+|[A-Za-z0-9.-]+(?=:))(:[0-9]+)?/"
_IMAGE = re.compile(rf"({_HOST})?{_PART}(/{_PART})*(:[\w.-]{{1,128}})?(@[\w:.+-]+)?")
_MOST_ANNOTATIONS = 256 * 1024
"""Bytes of all keys and values (apimachinery's TotalAnnotationSizeLimitB)."""


def _queue_label(job: Any) -> Iterator[Finding]:
    queue, scheduling = labelled_queue(job.metadata.labels), job.spec.scheduling
    if scheduling.system == QueueSystem.KUEUE and scheduling.queue is None and queue is None:
        text = f"is missing: Kueue admits nothing without the name of a queue, here or in the label {QUEUE_LABEL}"
        yield Finding(("spec", "scheduling", "queue"), text, NAME)
    conflict = queue_conflict(job.spec, queue) if queue is not None else ""
    if conflict:
        at = ("metadata", "labels", QUEUE_LABEL)
        yield Finding(at, f"is a queue of Kueue, and {conflict}", "one of the two, or both with the same queue")


def _metadata(metadata: Any) -> Iterator[Finding]:
    if metadata.namespace is not None and not names.is_dns_label(metadata.namespace):
        allowed = "at most 63 lower-case letters, digits and '-', a letter or digit first and last"
        yield Finding(("namespace",), "is no name of a namespace", allowed)
    yield from labels(("labels",), metadata.labels)
    yield from keys(("annotations",), metadata.annotations)
    size = sum(len(text.encode()) for pair in (metadata.annotations or {}).items() for text in pair)
    if size > _MOST_ANNOTATIONS:
        yield Finding(("annotations",), f"are {size} bytes together", f"at most {_MOST_ANNOTATIONS} bytes")


def _scheduling(scheduling: Any) -> Iterator[Finding]:
    yield from labels(("nodeSelector",), scheduling.node_selector)
    yield from object_name(("priorityClass",), scheduling.priority_class, "priority class")
    if scheduling.queue is not None and not (scheduling.queue and names.is_label_value(scheduling.queue)):
        yield Finding(("queue",), "is no name of a queue", "at most 63 letters, digits, '-', '_' and '.'")
    known = ("nodeAffinity", "podAffinity", "podAntiAffinity")
    for key in scheduling.affinity:
        if key not in known:
            yield Finding(("affinity", key), "is no field of an affinity", ", ".join(known))


def _image(spec: Any) -> Iterator[Finding]:
    if spec.image is not None and not _IMAGE.fullmatch(spec.image):
        yield Finding(("image",), "is no image", "like registry.example/name:tag, the name in lower case")


def _volume(volume: Any) -> Iterator[Finding]:
    for field, path in (("mountPath", volume.mount_path), ("hostPath", volume.host_path)):
        if path is not None and (":" in path or unprintable(path) or ".." in path.split("/")):
            yield Finding((field,), "is no path to mount", "absolute, without ':' and '..'")
    if volume.mount_path.strip("/") == "":
        yield Finding(("mountPath",), "would hide the whole image", "a folder below /")
    sub_path = volume.sub_path
    if sub_path is not None and (sub_path.startswith("/") or ".." in sub_path.split("/") or unprintable(sub_path)):
        yield Finding(("subPath",), "is no folder inside a volume", "relative, without '..'")
    yield from object_name(("claim",), volume.claim, "persistent volume claim")
    source = volume.source
    if source is not None and len(source) != 1:
        yield Finding(("source",), "is no source of a volume", "exactly one, like {nfs: {server: ..., path: ...}}")
    for kind, value in source.items() if source is not None and len(source) == 1 else ():
        if kind not in _VOLUME_SOURCES:
            near = difflib.get_close_matches(kind, _VOLUME_SOURCES, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Finding(("source", kind), f"is no source of a volume{hint}", ", ".join(_VOLUME_SOURCES))
        elif not isinstance(value, dict):
            yield Finding(("source", kind), "is no mapping", "a mapping, as in a pod")


def _cpu(resources: Any) -> Iterator[Finding]:
    if resources.cpu is not None and float(resources.cpu.rstrip("m")) == 0:
        yield Finding(("cpu",), "is no processor at all", "above 0, like 32 or 500m")


OBJECT_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJob: (_queue_label,),
    ObjectMeta: (_metadata,),
    RLJobSpec: (_image,),
    SchedulingSpec: (_scheduling,),
    StorageSpec: (at_least("sharedMemory", "64Mi"),),
    VolumeSpec: (_volume,),
    PodResources: (_cpu, at_least("memory", "256Mi")),
}
