"""Pod templates in `spec.pods.head` and `spec.pods.worker`: fields and types as KubeRay 1.6 has them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from rljob_api.kubernetes_names import is_dns_label
from rljob_api.rules.findings import Check, Finding, keys, labels, object_name
from rljob_api.rules.pod_fields import of_model
from rljob_api.spec import PodsSpec

_METADATA: dict[str, type] = {"annotations": dict, "labels": dict, "name": str, "namespace": str, "finalizers": list}
_WORDS: dict[type, str] = {dict: "a mapping", list: "a list", str: "a string"}
Path = tuple[str | int, ...]
OWN_LABEL_PREFIXES = ("rljob.dev/", "ray.io/")
MAX_ANNOTATIONS_BYTES = 128 * 1024
"""Half of what Kubernetes allows: KubeRay, Volcano and device plugins add theirs."""


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
        elif not isinstance(value, known[key]):
            yield Finding((*at, key), f"must be {_WORDS[known[key]]}", f"{_WORDS[known[key]]}, as in a pod")


def _template(role: str) -> Check:
    def check(pods: Any) -> Iterator[Finding]:
        template = getattr(pods, role)
        yield from _fields(template, {"metadata": dict, "spec": dict}, (role,))
        if isinstance(template.get("metadata"), dict):
            yield from _fields(template["metadata"], _METADATA, (role, "metadata"))
        if isinstance(template.get("spec"), dict):
            yield from of_model("PodSpec", template["spec"], (role, "spec"), whole=False)
        yield from _own_metadata(template.get("metadata"), (role, "metadata"))
        yield from _parts(template, (role, "spec"), f"ray-{role}")

    return check


def _own_metadata(metadata: Any, at: Path) -> Iterator[Finding]:
    """Labels and annotations of a template."""
    for part in ("labels", "annotations"):
        values = metadata.get(part) if isinstance(metadata, dict) else None
        for key, value in values.items() if isinstance(values, dict) else ():
            if value is not None and not isinstance(value, str):
                yield Finding((*at, part, key), "is no string", "a string, in quotation marks")
            elif value is not None and part == "labels":
                yield from _labels((*at, part), {key: value})
            elif value is not None:
                yield from keys((*at, part), [key])


def _parts(template: dict[str, Any], at: Path, ray: str) -> Iterator[Finding]:
    """Lists without which there is no pod of Ray, and names in them."""
    pod = template.get("spec", {})
    if pod is None or (isinstance(pod, dict) and pod.get("containers", []) is None):
        yield Finding((*at, "containers"), "takes Ray's container away", "leave it out")
        return
    for part in ("containers", "initContainers", "volumes") if isinstance(pod, dict) else ():
        items = pod.get(part)
        for i, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, dict):
                continue
            name = item.get("name")
            if not isinstance(name, str) or not is_dns_label(name):
                allowed = "lower-case letters, digits and '-', at most 63"
                yield Finding((*at, part, i), "has no name, or none that is one", f"name: {allowed}")
            elif name == ray and item.get("$patch") == "delete":
                yield Finding((*at, part, i), "is Ray's container, and cannot be deleted", "leave it out")


def _labels(at: Path, values: Any) -> Iterator[Finding]:
    yield from labels(at, values)
    for key in values:
        if key.startswith(OWN_LABEL_PREFIXES):
            yield Finding((*at, key), "belongs to the operator or KubeRay: pods are found by it", "another label")


def _names(pods: Any) -> Iterator[Finding]:
    yield from _labels(("labels",), pods.labels)
    yield from keys(("annotations",), pods.annotations)
    size = sum(len(key) + len(value.encode()) for key, value in pods.annotations.items())
    if size > MAX_ANNOTATIONS_BYTES:
        yield Finding(("annotations",), f"has {size} bytes", f"at most {MAX_ANNOTATIONS_BYTES}")
    yield from object_name(("serviceAccount",), pods.service_account, "service account")
    for i, name in enumerate(pods.image_pull_secrets):
        yield from object_name(("imagePullSecrets", i), name, "secret")


POD_CHECKS: dict[type, tuple[Check, ...]] = {PodsSpec: (_template("head"), _template("worker"), _names)}
