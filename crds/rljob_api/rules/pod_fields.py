"""Fields of pods: names, types, what is needed and which values an API server takes, at any depth.

`pod_fields.json` beside the package has the models of Kubernetes' API; `tests/support/pod_fields.py` writes it. What no
schema of Kubernetes says, since its server checks it in code, is in the tables here.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.rules.findings import LABEL_KEY, LABEL_VALUE, NAME, Finding

Path = tuple[str | int, ...]
QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
AMOUNT = "an amount, like 8, 500m or 2Gi"
_KINDS: dict[str, tuple[type, str]] = {
    "string": (str, "a string"),
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
}
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_SECCOMP = ("RuntimeDefault", "Localhost", "Unconfined")
_PULL = ("Always", "IfNotPresent", "Never")
_ENDS = ("Always", "OnFailure", "Never")
_HONOR = ("Honor", "Ignore")
WORDS: dict[str, tuple[str, ...]] = {
    "AppArmorProfile.type": _SECCOMP,
    "Container.imagePullPolicy": _PULL,
    "Container.restartPolicy": _ENDS,
    "Container.terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "ContainerPort.protocol": ("TCP", "UDP", "SCTP"),
    "HTTPGetAction.scheme": ("HTTP", "HTTPS"),
    "HostPathVolumeSource.type": (
        *("DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"),
    ),
    "ImageVolumeSource.pullPolicy": _PULL,
    "LabelSelectorRequirement.operator": _OPERATORS,
    "NodeSelectorRequirement.operator": (*_OPERATORS, "Gt", "Lt"),
    "PersistentVolumeClaimSpec.accessModes": ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    "PersistentVolumeClaimSpec.volumeMode": ("Filesystem", "Block"),
    "PodOS.name": ("linux",),
    "PodSecurityContext.fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    "PodSecurityContext.supplementalGroupsPolicy": ("Merge", "Strict"),
    "PodSpec.dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "PodSpec.preemptionPolicy": ("PreemptLowerPriority", "Never"),
    "PodSpec.restartPolicy": _ENDS,
    "SeccompProfile.type": _SECCOMP,
    "SecurityContext.procMount": ("Default", "Unmasked"),
    "Toleration.effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "Toleration.operator": ("Exists", "Equal", "Lt", "Gt"),
    "TopologySpreadConstraint.nodeAffinityPolicy": _HONOR,
    "TopologySpreadConstraint.nodeTaintsPolicy": _HONOR,
    "TopologySpreadConstraint.whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "VolumeMount.mountPropagation": ("None", "HostToContainer", "Bidirectional"),
    "VolumeMount.recursiveReadOnly": ("Disabled", "IfPossible", "Enabled"),
}
_PORT, _MODE, _USER, _COUNT = (1, 65535), (0, 0o777), (0, 2**31 - 1), (0, 2**31 - 1)
BOUNDS: dict[str, tuple[int, int]] = {
    "ContainerPort.containerPort": _PORT,
    "ContainerPort.hostPort": (0, 65535),
    "GRPCAction.port": _PORT,
    "PodSpec.activeDeadlineSeconds": (1, 2**31 - 1),
    "PodSpec.terminationGracePeriodSeconds": (0, 2**63 - 1),
    "PreferredSchedulingTerm.weight": (1, 100),
    "ServiceAccountTokenProjection.expirationSeconds": (600, 2**32),
    "SleepAction.seconds": (0, 2**63 - 1),
    "TopologySpreadConstraint.maxSkew": (1, 2**31 - 1),
    "TopologySpreadConstraint.minDomains": (1, 2**31 - 1),
    "WeightedPodAffinityTerm.weight": (1, 100),
    **{
        f"Probe.{name}": _COUNT
        for name in ("failureThreshold", "initialDelaySeconds", "periodSeconds", "successThreshold", "timeoutSeconds")
    },
    **{
        f"{context}.{name}": _USER
        for context in ("PodSecurityContext", "SecurityContext")
        for name in ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
    },
    **{
        f"{source}.{name}": _MODE
        for source, name in (
            *(("ConfigMapVolumeSource", "defaultMode"), ("SecretVolumeSource", "defaultMode"), ("KeyToPath", "mode")),
            *(("ProjectedVolumeSource", "defaultMode"), ("DownwardAPIVolumeSource", "defaultMode")),
            ("DownwardAPIVolumeFile", "mode"),
        )
    },
}
_OBJECTS = (
    *("ConfigMapEnvSource.name", "ConfigMapKeySelector.name", "ConfigMapProjection.name", "ConfigMapVolumeSource.name"),
    *("SecretEnvSource.name", "SecretKeySelector.name", "SecretProjection.name", "SecretVolumeSource.secretName"),
    *("PersistentVolumeClaimVolumeSource.claimName", "PodSpec.serviceAccountName", "PodSpec.priorityClassName"),
    *("PodSpec.runtimeClassName", "PodSpec.nodeName", "LocalObjectReference.name"),
)
"""Names of other objects."""
_NEEDED = {
    **dict.fromkeys(("ConfigMapEnvSource", "ConfigMapKeySelector"), "name"),
    **dict.fromkeys(("ConfigMapVolumeSource", "ConfigMapProjection"), "name"),
    **dict.fromkeys(("SecretEnvSource", "SecretKeySelector", "SecretProjection"), "name"),
    "SecretVolumeSource": "secretName",
}  # fmt: skip
"""Fields that the schema of Kubernetes calls optional, and its server asks for."""
_ONE_OF: dict[str, tuple[str, ...]] = {
    "EnvFromSource": ("configMapRef", "secretRef"),
    "EnvVarSource": ("configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"),
    "LifecycleHandler": ("exec", "httpGet", "sleep", "tcpSocket"),
    "PodResourceClaim": ("resourceClaimName", "resourceClaimTemplateName"),
    "Probe": ("exec", "grpc", "httpGet", "tcpSocket"),
}
_PORT_NAME = re.compile("(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_LABELS = ("PodSpec.nodeSelector", "LabelSelector.matchLabels")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_MERGED = {
    "Container": {*_PROBES, "securityContext", "resources", "volumeMounts", "ports"},
    "PodSpec": {"affinity", "securityContext", "containers", "initContainers"},
}
"""Fields of the operator's own pods and containers, into which a template's are merged: they may lack what is there."""
OWN_CONTAINERS = ("ray-head", "ray-worker")
OWN_PREFIX = "rljob-"
"""Names of containers and volumes that begin with it are the operator's."""


@functools.cache
def models() -> dict[str, dict[str, str]]:
    """Model of Kubernetes -> field -> type, with `!` behind it where it is needed."""
    text = FilePath(__file__).parents[1].joinpath("pod_fields.json").read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def is_amount(value: Any) -> bool:
    """Whether a value is a quantity."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, str) and QUANTITY.fullmatch(value) is not None
    )


def of_model(model: str, value: Any, at: Path, *, whole: bool) -> Iterator[Finding]:
    """Faults of a value of a model.

    Args:
        model: its name.
        value: the value.
        at: its place.
        whole: whether it is all that the pod gets; one that is merged into another may lack what is needed.
    """
    if not isinstance(value, dict):
        yield Finding(at, "is no mapping", "a mapping, as in a pod")
        return
    known, whole = models()[model], whole or value.get("$patch") == "replace"
    if value.get("$patch") == "delete" or (value and all(str(key).startswith("$") for key in value)):
        return
    given = {key: item for key, item in value.items() if item is not None and not str(key).startswith("$")}
    for key, item in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f", did you mean {near[0]}?" if near else ""
            fields = ", ".join(known) if len(known) <= 12 else "a field of Kubernetes"
            yield Finding((*at, key), f"is no field of a pod template{hint}", fields)
        else:
            complete = whole or key not in _MERGED.get(model, {key})
            yield from _field(model, key, known[key].rstrip("!"), item, (*at, key), whole=complete)
    if whole:
        yield from _lacking(model, given, at)
    yield from _alternatives(model, given, at, whole=whole)


def _lacking(model: str, given: dict[str, Any], at: Path) -> Iterator[Finding]:
    for key, of_type in models()[model].items():
        if key not in given and (of_type.endswith("!") or _NEEDED.get(model) == key):
            yield Finding((*at, key), "is missing", f"{_said(of_type.rstrip('!'))}, as in a pod")


def _alternatives(model: str, given: dict[str, Any], at: Path, *, whole: bool) -> Iterator[Finding]:
    if model == "EnvVar" and given.get("value") and "valueFrom" in given:
        yield Finding((*at, "valueFrom"), "has no place beside value", "one of value and valueFrom")
    among = _ONE_OF.get(model, ())
    there = [name for name in among if name in given]
    if among and (len(there) > 1 or (whole and not there)):
        yield Finding(at, f"needs exactly one of {', '.join(among)}", "one of them, and none of the others")


def _said(of_type: str) -> str:
    if of_type in _KINDS:
        return _KINDS[of_type][1]
    words = {"amount": AMOUNT, "port": "a port, or its name", "[": "a list"}
    return words.get(of_type) or words.get(of_type[0], "a mapping")


def _field(model: str, key: str, of_type: str, value: Any, at: Path, *, whole: bool) -> Iterator[Finding]:
    if of_type.startswith("["):
        if not isinstance(value, list):
            yield Finding(at, "must be a list", "a list, as in a pod")
            return
        for index, item in enumerate(value):
            complete = not _is_own(item) if model == "PodSpec" else whole or model not in _MERGED
            yield from _field(model, key, of_type[1:-1], item, (*at, index), whole=complete)
    elif of_type.startswith("{"):
        if not isinstance(value, dict):
            yield Finding(at, "must be a mapping", "a mapping, as in a pod")
            return
        for name, item in value.items():
            if item is not None and not str(name).startswith("$"):
                yield from _entry(f"{model}.{key}", of_type[1:-1], name, item, (*at, name))
    elif of_type in models():
        yield from of_model(of_type, value, at, whole=whole)
    else:
        yield from _plain(f"{model}.{key}", of_type, value, at)


def _is_own(item: Any) -> bool:
    name = item.get("name") if isinstance(item, dict) else None
    return name in OWN_CONTAINERS or (isinstance(name, str) and name.startswith(OWN_PREFIX))


def _entry(field: str, of_type: str, name: str, value: Any, at: Path) -> Iterator[Finding]:
    """A key of a mapping, and its value."""
    if (of_type == "amount" or field in _LABELS) and not names.is_label_key(name):
        yield Finding(at, "is no key" if field in _LABELS else "is no name of a resource", LABEL_KEY)
    elif field in _LABELS and isinstance(value, str) and not names.is_label_value(value):
        yield Finding(at, "is no value of a label", LABEL_VALUE)
    else:
        yield from _plain(field, of_type, value, at)


def _plain(field: str, of_type: str, value: Any, at: Path) -> Iterator[Finding]:
    if of_type in _KINDS:
        kind, said = _KINDS[of_type]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            quote = ", in quotation marks" if kind is str and isinstance(value, int | float) else ""
            yield Finding(at, f"must be {said}{quote}", f"{said}, as in a pod")
            return
    elif of_type == "amount":
        if not is_amount(value):
            yield Finding(at, "is no amount", AMOUNT)
        elif str(value).startswith("-"):
            yield Finding(at, "is below 0", AMOUNT)
        return
    elif of_type == "port":
        is_port = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535
        if not is_port and not (isinstance(value, str) and _PORT_NAME.fullmatch(value)):
            yield Finding(at, "is no port", "1 to 65535, or the name of one of the container's ports")
        return
    low, high = BOUNDS.get(field, (-(2**63), 2**63 - 1))
    if isinstance(value, int) and not low <= value <= high:
        yield Finding(at, "is too small" if value < low else "is too large", f"{low} to {high}")
    elif isinstance(value, str):
        yield from _text(field, value, at)


def _text(field: str, value: str, at: Path) -> Iterator[Finding]:
    words = WORDS.get(field)
    if words is not None and value not in ("", *words):
        yield Finding(at, "is not one of the allowed values", ", ".join(words))
    elif field in _OBJECTS and not names.is_subdomain(value) and (value or not field.startswith("LocalObject")):
        yield Finding(at, "is no name of an object", NAME)
    elif field in ("PodSpec.hostname", "PodSpec.subdomain") and not names.is_dns_label(value):
        yield Finding(at, "is no name of a host", "lower-case letters, digits and '-', at most 63")
    elif field == "ContainerPort.name" and value and not _PORT_NAME.fullmatch(value):
        yield Finding(at, "is no name of a port", "lower-case letters, digits and '-', a letter among them, at most 15")
    elif field == "EmptyDirVolumeSource.medium" and value not in ("", "Memory") and not value.startswith("HugePages"):
        yield Finding(at, "is no medium", "Memory, HugePages, or left out: the node's disk")
    elif field in ("VolumeMount.subPath", "VolumeMount.subPathExpr") and (
        value.startswith("/") or ".." in value.split("/")
    ):
        yield Finding(at, "is no folder inside a volume", "relative, without '..'")
    elif field in ("VolumeMount.mountPath", "HostPathVolumeSource.path") and ".." in value.split("/"):
        yield Finding(at, "leads upwards", "a path without '..'")
    elif field == "VolumeMount.mountPath" and ":" in value:
        yield Finding(at, "is no path to mount", "absolute, without ':'")
    elif field == "NFSVolumeSource.path" and not value.startswith("/"):
        yield Finding(at, "is no folder of a server", "an absolute path")
    elif field in ("HostAlias.ip", "PodDNSConfig.nameservers") and not _is_address(value):
        yield Finding(at, "is no address", "an IPv4 or IPv6 address")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
