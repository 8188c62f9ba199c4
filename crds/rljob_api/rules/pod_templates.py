"""Pod templates in `spec.pods.head` and `spec.pods.worker`: fields and types as KubeRay 1.6 knows them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from rljob_api.rules.findings import Check, Finding, keys, labels, object_name
from rljob_api.spec import PodsSpec

_METADATA: dict[str, type] = {"annotations": dict, "labels": dict, "name": str, "namespace": str, "finalizers": list}


def _known(text: str) -> dict[str, type]:
    """Field -> type; a line for each type."""
    lines = (line.split() for line in text.split(";"))
    return {name: _TYPES[kind.strip(":")] for kind, *names in lines for name in names}


_TYPES: dict[str, type] = {"lists": list, "mappings": dict, "strings": str, "booleans": bool, "integers": int}
_POD = _known("""
    lists: containers ephemeralContainers hostAliases imagePullSecrets initContainers readinessGates resourceClaims
        schedulingGates tolerations topologySpreadConstraints volumes;
    mappings: affinity dnsConfig nodeSelector os overhead resources securityContext workloadRef;
    strings: dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName restartPolicy
        runtimeClassName schedulerName serviceAccount serviceAccountName subdomain;
    booleans: automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers setHostnameAsFQDN
        shareProcessNamespace;
    integers: activeDeadlineSeconds priority terminationGracePeriodSeconds
""")
_CONTAINER = _known("""
    lists: args command env envFrom ports resizePolicy restartPolicyRules volumeDevices volumeMounts;
    mappings: lifecycle livenessProbe readinessProbe resources securityContext startupProbe;
    strings: image imagePullPolicy name restartPolicy terminationMessagePath terminationMessagePolicy workingDir;
    booleans: stdin stdinOnce tty
""")
_WORDS = {
    dict: "a mapping",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a whole number",
}
Path = tuple[str | int, ...]


def _fields(given: Any, known: dict[str, type], at: Path) -> Iterator[Finding]:
    if not isinstance(given, dict):
        yield Finding(at, "is no mapping", "a mapping, as in a pod")
        return
    for key, value in given.items():
        # `$patch` and its like say how lists are merged; null takes a field away.
        if str(key).startswith("$") or (key in known and value is None):
            continue
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Finding((*at, key), f"is no field of a pod template{hint}", "a field of Kubernetes")
        elif not isinstance(value, known[key]) or (known[key] is int and isinstance(value, bool)):
            yield Finding((*at, key), f"must be {_WORDS[known[key]]}", f"{_WORDS[known[key]]}, as in a pod")


def _template(role: str) -> Check:
    def check(pods: Any) -> Iterator[Finding]:
        template = getattr(pods, role)
        yield from _fields(template, {"metadata": dict, "spec": dict}, (role,))
        for part, known in (("metadata", _METADATA), ("spec", _POD)):
            if isinstance(template.get(part), dict):
                yield from _fields(template[part], known, (role, part))
        pod = template.get("spec")
        for part in ("containers", "initContainers") if isinstance(pod, dict) else ():
            containers = pod.get(part)
            for i, container in enumerate(containers if isinstance(containers, list) else ()):
                yield from _fields(container, _CONTAINER, (role, "spec", part, i))

    return check


def _names(pods: Any) -> Iterator[Finding]:
    yield from labels(("labels",), pods.labels)
    yield from keys(("annotations",), pods.annotations)
    yield from object_name(("serviceAccount",), pods.service_account, "service account")
    for i, name in enumerate(pods.image_pull_secrets):
        yield from object_name(("imagePullSecrets", i), name, "secret")


POD_CHECKS: dict[type, tuple[Check, ...]] = {PodsSpec: (_template("head"), _template("worker"), _names)}
