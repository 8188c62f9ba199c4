"""Parts of pods that a manifest holds as Kubernetes writes them: volumes, containers, affinities.

The API server looks at them only when the pods are made, minutes after the job was accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.rules.findings import LABEL_KEY, Check, Finding
from rljob_api.spec import CheckpointSpec, PodsSpec, RLJobSpec, SchedulingSpec, VolumeSpec

Path = tuple[str | int, ...]
_NEEDED = {
    "nfs": ("server", "path"),
    "persistentVolumeClaim": ("claimName",),
    "hostPath": ("path",),
    "configMap": ("name",),
    "secret": ("secretName",),
    "csi": ("driver",),
}
"""Fields without which a source of a volume names nothing."""
_WORDS = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}
_HOST_PATHS = (*("", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"),)
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_VARIABLE = re.compile("[ -<>-~]+")
"""Kubernetes takes these since 1.30: programs beside Ray's have names like `discovery.type`."""
_AMOUNT = "an amount, like 8, 500m or 2Gi"


def _mappings(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The mappings of a list; what is no list is another check's, and `$patch` says how it is merged."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict) and "$patch" not in item:
            yield index, item


def _is_amount(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, str) and _QUANTITY.fullmatch(value) is not None
    )


def _source(at: Path, kind: str, source: Any, *, whole: bool) -> Iterator[Finding]:
    """A source of a volume; one that is not `whole` is merged into that of the volume of the same name."""
    if not isinstance(source, dict):
        return
    for field in _NEEDED.get(kind, ()):
        value = source.get(field)
        if value is None and not whole:
            continue
        if not isinstance(value, str) or not value.strip():
            yield Finding((*at, kind, field), "is missing, empty or no string", f"a string, as {kind} of a pod needs")
    if kind == "hostPath" and (source.get("type") or "") not in _HOST_PATHS:
        yield Finding((*at, kind, "type"), "is no type of a path", ", ".join(_HOST_PATHS[1:]))
    if kind == "emptyDir" and not _is_amount(1 if source.get("sizeLimit") is None else source["sizeLimit"]):
        yield Finding((*at, kind, "sizeLimit"), "is no amount", _AMOUNT)


def _volume(volume: Any) -> Iterator[Finding]:
    if volume.claim is not None or volume.host_path is not None:
        return
    for kind, source in (volume.source or {}).items():
        yield from _source(("source",), kind, source, whole=True)


def _words(at: Path, part: dict[str, Any]) -> Iterator[Finding]:
    for field, words in _WORDS.items():
        if isinstance(part.get(field), str) and part[field] not in ("", *words):
            yield Finding((*at, field), "is not one of the allowed values", ", ".join(words))


def _container(at: Path, container: dict[str, Any]) -> Iterator[Finding]:
    yield from _words(at, container)
    if isinstance(image := container.get("image"), str) and (not image or re.search(r"\s", image)):
        yield Finding((*at, "image"), "is no image: it is empty or holds blanks", "like registry.example/name:tag")
    for index, variable in _mappings(container.get("env")):
        name, value = variable.get("name"), variable.get("value")
        if not isinstance(name, str) or _VARIABLE.fullmatch(name) is None:
            yield Finding((*at, "env", index, "name"), "is no name of a variable", "printable ASCII without '='")
        if value is not None and not isinstance(value, str):
            yield Finding((*at, "env", index, "value"), "is no string", "a string, in quotation marks")
    for index, mount in _mappings(container.get("volumeMounts")):
        # What is merged is found by its path; a name may be that of the mount there.
        if not isinstance(mount.get("mountPath"), str) or not mount["mountPath"]:
            yield Finding((*at, "volumeMounts", index, "mountPath"), "is missing, empty or no string", "a string")
    resources = container.get("resources")
    for part in ("limits", "requests") if isinstance(resources, dict) else ():
        amounts = (resources or {}).get(part)
        for name, amount in amounts.items() if isinstance(amounts, dict) else ():
            if amount is not None and not str(name).startswith("$") and not _is_amount(amount):
                yield Finding((*at, "resources", part, name), "is no amount", _AMOUNT)
    yield from _security(at, container)


def _security(at: Path, part: dict[str, Any]) -> Iterator[Finding]:
    context = part.get("securityContext")
    for field in ("runAsUser", "runAsGroup", "fsGroup") if isinstance(context, dict) else ():
        number = (context or {}).get(field)
        if number is not None and (type(number) is not int or not 0 <= number < 2**31):
            yield Finding((*at, "securityContext", field), "is no number of a user or group", "0 to 2147483647")


def _template(role: str) -> Check:
    def check(pods: Any) -> Iterator[Finding]:
        pod, at = getattr(pods, role).get("spec"), (role, "spec")
        if not isinstance(pod, dict):
            return
        yield from _words(at, pod)
        yield from _security(at, pod)
        for part in ("containers", "initContainers"):
            seen: set[str] = set()
            for index, container in _mappings(pod.get(part)):
                yield from _container((*at, part, index), container)
                name = container.get("name")
                if isinstance(name, str) and name in seen:
                    wrong = "is the name of another container"
                    yield Finding((*at, part, index, "name"), wrong, "a name of its own for each")
                seen |= {name} if isinstance(name, str) else set()
        for index, volume in _mappings(pod.get("volumes")):
            kinds = [
                key
                for key, value in volume.items()
                if key != "name" and not str(key).startswith("$") and value is not None
            ]
            if len(kinds) > 1:
                wrong = f"has {len(kinds)} sources: {', '.join(kinds)}"
                yield Finding((*at, "volumes", index), wrong, "exactly one")
            for kind in kinds:
                yield from _source((*at, "volumes", index), kind, volume[kind], whole=False)
        yield from _affinity((*at, "affinity"), pod.get("affinity"))

    return check


def _terms(at: Path, term: Any) -> Iterator[Finding]:
    """Expressions over labels."""
    for part in ("matchExpressions", "matchFields") if isinstance(term, dict) else ():
        for index, one in _mappings(term.get(part)):
            here, operator, values = (*at, part, index), one.get("operator"), one.get("values")
            if not isinstance(one.get("key"), str) or not names.is_label_key(one["key"]):
                yield Finding((*here, "key"), "is no key", LABEL_KEY)
            if operator not in _OPERATORS:
                yield Finding((*here, "operator"), "is not one of the allowed values", ", ".join(_OPERATORS))
            elif operator in ("In", "NotIn", "Gt", "Lt") and not (isinstance(values, list) and values):
                yield Finding((*here, "values"), f"is needed by {operator}", "a list of strings")
            elif operator in ("Exists", "DoesNotExist") and values:
                yield Finding((*here, "values"), f"has no effect with {operator}", "leave it out")


def _affinity(at: Path, affinity: Any) -> Iterator[Finding]:
    for kind, rules in affinity.items() if isinstance(affinity, dict) else ():
        if not isinstance(rules, dict):
            continue
        of_nodes, required = kind == "nodeAffinity", rules.get(_REQUIRED)
        if of_nodes and isinstance(required, dict):
            here = (*at, kind, _REQUIRED, "nodeSelectorTerms")
            if required.get("nodeSelectorTerms") == []:
                yield Finding(here, "is empty: no node would do", "one term at least")
            for index, term in _mappings(required.get("nodeSelectorTerms")):
                yield from _terms((*here, index), term)
        elif not of_nodes:
            for index, term in _mappings(required):
                yield from _topology((*at, kind, _REQUIRED, index), term)
        for index, wish in _mappings(rules.get(_PREFERRED)):
            here, inner = (*at, kind, _PREFERRED, index), "preference" if of_nodes else "podAffinityTerm"
            weight = wish.get("weight")
            if type(weight) is not int or not 1 <= weight <= 100:
                yield Finding((*here, "weight"), "is missing, or no weight", "a whole number from 1 to 100")
            if not isinstance(wish.get(inner), dict):
                yield Finding((*here, inner), "is missing, or no mapping", "a mapping, as in a pod")
            else:
                yield from (_terms if of_nodes else _topology)((*here, inner), wish[inner])


def _topology(at: Path, term: Any) -> Iterator[Finding]:
    key = term.get("topologyKey")
    if not isinstance(key, str) or not names.is_label_key(key):
        yield Finding((*at, "topologyKey"), "is missing, or no key", "like kubernetes.io/hostname")
    yield from _terms((*at, "labelSelector"), term.get("labelSelector"))


def _placed(scheduling: Any) -> Iterator[Finding]:
    yield from _affinity(("affinity",), scheduling.affinity)


def _grace(spec: Any) -> Iterator[Finding]:
    grace, saving = spec.pods.termination_grace_seconds, spec.checkpoint.grace_seconds
    # A default is no wish: who shortens the pods' time alone means the time for saving too.
    default = CheckpointSpec.model_fields["grace_seconds"].default
    if grace is not None and saving != default and grace < saving:
        wrong = f"ends a pod before the {saving:g} s of checkpoint.graceSeconds, in which it saves, are over"
        yield Finding(("pods", "terminationGraceSeconds"), wrong, f"at least {saving:g}, or leave it out")


SHAPE_CHECKS: dict[type, tuple[Check, ...]] = {
    VolumeSpec: (_volume,),
    PodsSpec: (_template("head"), _template("worker")),
    SchedulingSpec: (_placed,),
    RLJobSpec: (_grace,),
}
