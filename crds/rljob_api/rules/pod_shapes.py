"""Parts of pods that a manifest holds as Kubernetes writes them: volumes, containers, affinities.

The API server looks at them only when the pods are made, minutes after the job was accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.profiles import PROFILES
from rljob_api.quantities import to_decimal
from rljob_api.rules.findings import LABEL_KEY, Check, Finding
from rljob_api.rules.pod_fields import OWN_CONTAINERS, OWN_PREFIX, is_amount, models, of_model
from rljob_api.rules.pods import COMPILE_CACHE
from rljob_api.rules.variables import ALLOCATORS, OWNED
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
"""Texts without which a source of a volume names nothing: they are not empty either."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_VARIABLE = re.compile("[ -<>-~]+")
"""Kubernetes takes these since 1.30: programs beside Ray's have names like `discovery.type`."""
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HANDLERS = ("exec", "grpc", "tcpSocket")
_SEGMENTS = re.compile(r"(?i)expandable_segments\s*:\s*True")
_OF_KUBERAY = ("ray-logs", "shared-mem")
"""Volumes that KubeRay adds to pods."""


def _mappings(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The mappings of a list; what is no list is another check's, and `$patch` says how it is merged."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict) and "$patch" not in item:
            yield index, item


def _items(part: dict[str, Any], field: str) -> list[Any]:
    return value if isinstance(value := part.get(field), list) else []


def _source(at: Path, kind: str, source: Any) -> Iterator[Finding]:
    for field in _NEEDED.get(kind, ()) if isinstance(source, dict) else ():
        value = source.get(field)
        if isinstance(value, str) and not value.strip():
            yield Finding((*at, kind, field), "is empty", f"a string, as {kind} of a pod needs")


def _volume(volume: Any) -> Iterator[Finding]:
    if volume.claim is not None or volume.host_path is not None:
        return
    kinds = models()["Volume"]
    for kind, source in (volume.source or {}).items():
        if kind in kinds and kind != "name" and source is not None:
            yield from of_model(kinds[kind], source, ("source", kind), whole=True)
        yield from _source(("source",), kind, source)


def _container(at: Path, container: dict[str, Any], *, whole: bool) -> Iterator[Finding]:
    image = container.get("image")
    if (whole and image is None) or (isinstance(image, str) and (not image or re.search(r"\s", image))):
        wrong = "is missing" if image is None else "is no image: it is empty or holds blanks"
        yield Finding((*at, "image"), wrong, "like registry.example/name:tag")
    for index, variable in _mappings(container.get("env")):
        name = variable.get("name")
        if isinstance(name, str) and _VARIABLE.fullmatch(name) is None:
            yield Finding((*at, "env", index, "name"), "is no name of a variable", "printable ASCII without '='")
    seen: set[str] = set()
    for index, mount in _mappings(container.get("volumeMounts")):
        # What is merged is found by its path; a name may be that of the mount there.
        path = mount.get("mountPath")
        if not isinstance(path, str) or not path:
            yield Finding((*at, "volumeMounts", index, "mountPath"), "is missing, empty or no string", "a string")
        elif path in seen:
            yield Finding((*at, "volumeMounts", index, "mountPath"), "is mounted already", "another place")
        else:
            seen.add(path)
    yield from _amounts(at, container.get("resources"))
    yield from _security(at, container)


def _amounts(at: Path, resources: Any) -> Iterator[Finding]:
    """Requests above their limits."""
    given = resources if isinstance(resources, dict) else {}
    limits, requests = given.get("limits"), given.get("requests")
    if not isinstance(limits, dict) or not isinstance(requests, dict):
        return
    for name, asked in requests.items():
        most = limits.get(name)
        if is_amount(asked) and is_amount(most) and to_decimal(str(asked)) > to_decimal(str(most)):
            yield Finding((*at, "resources", "requests", name), "is more than its limit", f"at most {most}")


def _security(at: Path, part: dict[str, Any]) -> Iterator[Finding]:
    context = part.get("securityContext")
    if isinstance(context, dict) and context.get("runAsNonRoot") is True and context.get("runAsUser") == 0:
        yield Finding((*at, "securityContext", "runAsUser"), "is root, with runAsNonRoot: true", "1 or more")


def _own(at: Path, container: dict[str, Any]) -> Iterator[Finding]:
    """Parts of Ray's container that do not go with what they are merged into."""
    for probe in _PROBES:
        given = container.get(probe)
        if isinstance(given, dict) and "$patch" not in given and given.get("httpGet", "") is not None:
            for handler in _HANDLERS:
                if given.get(handler) is not None:
                    wrong = "stands beside the httpGet of RLJob's own probe, and a probe has one of them"
                    yield Finding((*at, probe, handler), wrong, "httpGet: null beside it")
    for index, variable in _mappings(container.get("env")):
        if (why := OWNED.get(str(variable.get("name")))) is not None:
            yield Finding((*at, "env", index), f"is not the user's: {why}", "leave it out")
        elif variable.get("name") in ALLOCATORS and _SEGMENTS.search(str(variable.get("value"))):
            wrong = "neither the memory saver nor vLLM's sleep mode works with this setting of the allocator"
            yield Finding((*at, "env", index, "value"), wrong, "expandable_segments:False")
    context = container.get("securityContext")
    if (
        isinstance(context, dict)
        and context.get("privileged") is True
        and "$patch" not in context
        and context.get("allowPrivilegeEscalation", False) is False
    ):
        wrong = "does not go with allowPrivilegeEscalation: false, which RLJob's pods have"
        yield Finding((*at, "securityContext", "privileged"), wrong, "allowPrivilegeEscalation: true beside it")


def _template(role: str) -> Check:
    def check(pods: Any) -> Iterator[Finding]:
        pod, at = getattr(pods, role).get("spec"), (role, "spec")
        if not isinstance(pod, dict):
            return
        yield from _security(at, pod)
        yield from _containers(at, pod, f"ray-{role}")
        if pod.get("ephemeralContainers"):
            yield Finding((*at, "ephemeralContainers"), "are added to pods that run", "containers or initContainers")
        if pod.get("dnsPolicy") == "None" and not isinstance(pod.get("dnsConfig"), dict):
            yield Finding((*at, "dnsPolicy"), "leaves the pod without a name server", "dnsConfig with nameservers too")
        yield from _volumes(at, pod)
        yield from _affinity((*at, "affinity"), pod.get("affinity"))
        for index, toleration in _mappings(pod.get("tolerations")):
            yield from _toleration((*at, "tolerations", index), toleration)

    return check


def _containers(at: Path, pod: dict[str, Any], ray: str) -> Iterator[Finding]:
    seen: set[str] = set()
    for part in ("containers", "initContainers"):
        for index, container in _mappings(pod.get(part)):
            name, here = container.get("name"), (*at, part, index)
            own = name == ray or str(name).startswith(OWN_PREFIX)
            yield from _container(here, container, whole=not own)
            if own:
                yield from _own(here, container)
            if isinstance(name, str) and name in seen:
                yield Finding((*here, "name"), "is the name of another container", "a name of its own for each")
            seen |= {name} if isinstance(name, str) else set()
            for probe in _PROBES if part == "initContainers" and container.get("restartPolicy") != "Always" else ():
                if container.get(probe) is not None:
                    wrong = "has no effect on what ends before the pod's containers start"
                    yield Finding((*here, probe), wrong, "leave it out, or restartPolicy: Always beside it")
        seen |= {ray}


def _toleration(at: Path, toleration: dict[str, Any]) -> Iterator[Finding]:
    operator = toleration.get("operator") or "Equal"
    if operator == "Exists" and toleration.get("value"):
        yield Finding((*at, "value"), "does not go with operator Exists", "leave it out, or operator Equal")
    if operator == "Equal" and not toleration.get("key"):
        yield Finding((*at, "key"), "is missing, as operator Equal (the default) needs it", "a key, or operator Exists")
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        yield Finding((*at, "tolerationSeconds"), "does nothing: only NoExecute evicts", "effect: NoExecute beside it")


def _volumes(at: Path, pod: dict[str, Any]) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, volume in _mappings(pod.get("volumes")):
        name = volume.get("name")
        kinds = [
            key for key, value in volume.items() if key != "name" and not str(key).startswith("$") and value is not None
        ]
        if len(kinds) > 1:
            wrong = f"has {len(kinds)} sources: {', '.join(kinds)}"
            yield Finding((*at, "volumes", index), wrong, "exactly one")
        for kind in kinds:
            yield from _source((*at, "volumes", index), kind, volume[kind])
        if isinstance(name, str) and name in seen:
            yield Finding(
                (*at, "volumes", index, "name"), "is the name of another volume", "a name of its own for each"
            )
        seen |= {name} if isinstance(name, str) else set()


def _terms(at: Path, term: Any) -> Iterator[Finding]:
    """Expressions over labels."""
    for part in ("matchExpressions", "matchFields") if isinstance(term, dict) else ():
        for index, one in _mappings(term.get(part)):
            here, operator, values = (*at, part, index), one.get("operator"), one.get("values")
            if isinstance(one.get("key"), str) and not names.is_label_key(one["key"]):
                yield Finding((*here, "key"), "is no key", LABEL_KEY)
            if operator in ("In", "NotIn", "Gt", "Lt") and not (isinstance(values, list) and values):
                yield Finding((*here, "values"), f"is needed by {operator}", "a list of strings")
            elif operator in ("Exists", "DoesNotExist") and values:
                yield Finding((*here, "values"), f"has no effect with {operator}", "leave it out")
            elif operator in ("Gt", "Lt") and re.fullmatch("-?[0-9]+", " ".join(map(str, values or ()))) is None:
                yield Finding(
                    (*here, "values"), f"is no number, as {operator} compares", "one whole number, as a string"
                )


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
            inner = "preference" if of_nodes else "podAffinityTerm"
            if isinstance(wish.get(inner), dict):
                yield from (_terms if of_nodes else _topology)((*at, kind, _PREFERRED, index, inner), wish[inner])


def _topology(at: Path, term: Any) -> Iterator[Finding]:
    key = term.get("topologyKey")
    if isinstance(key, str) and not names.is_label_key(key):
        yield Finding((*at, "topologyKey"), "is no key", "like kubernetes.io/hostname")
    yield from _terms((*at, "labelSelector"), term.get("labelSelector"))


def _placed(scheduling: Any) -> Iterator[Finding]:
    yield from of_model("Affinity", scheduling.affinity, ("affinity",), whole=True)
    yield from _affinity(("affinity",), scheduling.affinity)


def _mounted(spec: Any) -> Iterator[Finding]:
    """Mounts of volumes that the pod does not have."""
    given = {volume.name: volume.mount_path for volume in spec.storage.volumes}
    for role in ("head", "worker"):
        pod = getattr(spec.pods, role).get("spec")
        if not isinstance(pod, dict) or "$patch" in pod:
            continue
        volumes = [volume for volume in _items(pod, "volumes") if isinstance(volume, dict)]
        gone = {volume.get("name") for volume in volumes if volume.get("$patch") == "delete"}
        there = ({*given, *_OF_KUBERAY} | {volume.get("name") for volume in volumes}) - gone
        yield from _unmounted(("pods", role, "spec"), pod, there, {*given.values(), *_own_paths(spec)})
        mine = [c for _, c in _mappings(pod.get("containers")) if c.get("name") == f"ray-{role}"]
        kept = set(given) & gone - {given_name for given_name, path in given.items() if _moved(mine, path)}
        for index, volume in enumerate(_items(pod, "volumes")):
            if isinstance(volume, dict) and volume.get("name") in kept:
                wrong = "is deleted, and still mounted in Ray's container"
                allowed = f"{{mountPath: {given[volume['name']]}, $patch: delete}} in its volumeMounts too"
                yield Finding(("pods", role, "spec", "volumes", index), wrong, allowed)


def _moved(containers: list[dict[str, Any]], path: str) -> bool:
    """Whether a template says what is mounted at a path of Ray's container."""
    return any(
        "$patch" in one or any(isinstance(m, dict) and m.get("mountPath") == path for m in _items(one, "volumeMounts"))
        for one in containers
    )


def _own_paths(spec: Any) -> list[str]:
    """Places of a worker where the operator mounts something."""
    profile, given = PROFILES[spec.resources.profile], spec.resources.overrides.host_mounts
    return [*(given or ()), *(mount.path for mount in profile.host_mounts), "/dev/shm", COMPILE_CACHE]


def _unmounted(at: Path, pod: dict[str, Any], there: set[Any], mounted: set[str]) -> Iterator[Finding]:
    for part in ("containers", "initContainers"):
        for index, container in _mappings(pod.get(part)):
            own = container.get("name") in OWN_CONTAINERS or str(container.get("name")).startswith(OWN_PREFIX)
            for position, mount in _mappings(container.get("volumeMounts")):
                name, here = mount.get("name"), (*at, part, index, "volumeMounts", position, "name")
                if isinstance(name, str) and name not in there and not name.startswith(OWN_PREFIX):
                    allowed = ", ".join(sorted(str(one) for one in there if one not in _OF_KUBERAY)) or "none is there"
                    yield Finding(here, "is the name of no volume of the pod", f"one of its volumes: {allowed}")
                elif name is None and own and mount.get("mountPath") not in mounted:
                    yield Finding(here, "is missing", "the name of one of the pod's volumes")


def _grace(spec: Any) -> Iterator[Finding]:
    grace, saving = spec.pods.termination_grace_seconds, spec.checkpoint.grace_seconds
    # A default is no wish: who shortens the pods' time alone means the time for saving too.
    default = CheckpointSpec.model_fields["grace_seconds"].default
    if grace is not None and saving != default and grace < saving:
        yield _too_short(("pods", "terminationGraceSeconds"), saving)
    for role in ("head", "worker"):
        pod = getattr(spec.pods, role).get("spec")
        own = pod.get("terminationGracePeriodSeconds") if isinstance(pod, dict) else None
        if type(own) is int and saving != default and own < saving:
            yield _too_short(("pods", role, "spec", "terminationGracePeriodSeconds"), saving)


def _too_short(at: Path, saving: float) -> Finding:
    wrong = f"ends a pod before the {saving:g} s of checkpoint.graceSeconds, in which it saves, are over"
    return Finding(at, wrong, f"at least {saving:g}, or leave it out")


SHAPE_CHECKS: dict[type, tuple[Check, ...]] = {
    VolumeSpec: (_volume,),
    PodsSpec: (_template("head"), _template("worker")),
    SchedulingSpec: (_placed,),
    RLJobSpec: (_grace, _mounted),
}
