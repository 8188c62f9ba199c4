"""Holds a job to the administrator's policy.

Only what a manifest brings is looked at: what hardware profile and operator add, such as the driver's read-only mounts,
is the administrator's already. The chart ships the same rules as a ValidatingAdmissionPolicy
(`templates/job-policy.yaml`); `tests/cluster/test_admission_policy.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from rljob_api.json_types import Json
from rljob_api.spec import RLJobSpec
from rljob_operator.kubernetes_objects import Manifest
from rljob_operator.render.errors import RenderError
from rljob_operator.render.job_policy import JobPolicy, PodField, is_below, matches
from rljob_operator.render.ray_cluster import uses_token
from rljob_operator.render.settings import RenderSettings, short
from rljob_operator.state.observed import JobView

_HOST_MOUNT = "rljob-host-"
_PATTERNS = ("images", "imagePullSecrets", "secrets", "serviceAccounts", "priorityClasses")
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
# Pod Security Standard "baseline" (kubernetes.io/docs/concepts/security/pod-security-standards).
_POD_SECURITY = {
    "fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile", "supplementalGroups",
    "supplementalGroupsPolicy",
}  # fmt: skip
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem", "runAsGroup", "runAsNonRoot", "runAsUser",
    "seccompProfile",
}  # fmt: skip
_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
_UNCONFINING = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)


class _Wish(NamedTuple):
    """Something that a manifest asks for."""

    field: str
    rule: str
    """The policy's value that decides."""
    name: str = ""
    """The requested value; empty where the field says it all."""


def check_policy(job: JobView, spec: RLJobSpec, settings: RenderSettings) -> None:
    """Refuse what the administrator's policy does not allow.

    Args:
        job: the job, whose namespace may be trusted.
        spec: its spec, which is valid.
        settings: the operator's; without a policy everything is allowed.

    Raises:
        RenderError: the first that is not allowed, with its field and the rule.
    """
    policy = settings.policy
    if policy is None or job.namespace in policy.trusted_namespaces:
        return
    for wish in _wishes(spec, settings):
        if not _allowed(wish, policy):
            listed = policy.model_dump(by_alias=True)[wish.rule]
            what = f"{short(wish.name)} is" if wish.name else "is"
            allows = "is false" if isinstance(listed, bool) else f"allows {', '.join(listed) or 'none'}"
            raise RenderError(
                wish.field, f"{what} not allowed by the administrator: policy.{wish.rule} of the chart {allows}"
            )


def _allowed(wish: _Wish, policy: JobPolicy) -> bool:
    if wish.rule in _PATTERNS:
        return matches(getattr(policy, _snake(wish.rule)), wish.name)
    if wish.rule == "hostPaths":
        return is_below(policy.host_paths, wish.name)
    if wish.rule == "readOnlyHostPaths":
        return is_below([*policy.host_paths, *policy.read_only_host_paths], wish.name)
    if wish.rule == "volumeTypes":
        return wish.name in policy.volume_types
    if wish.rule == "podFields":
        return wish.name in policy.pod_fields
    return bool(getattr(policy, _snake(wish.rule)))


def _snake(rule: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in rule)


def _wishes(spec: RLJobSpec, settings: RenderSettings) -> Iterator[_Wish]:
    if spec.image is not None:
        yield _Wish("spec.image", "images", spec.image)
    if spec.pods.service_account is not None:
        yield _Wish("spec.pods.serviceAccount", "serviceAccounts", spec.pods.service_account)
    for i, name in enumerate(spec.pods.image_pull_secrets):
        yield _Wish(f"spec.pods.imagePullSecrets[{i}]", "imagePullSecrets", name)
    for i, name in enumerate(spec.environment.secrets):
        yield _Wish(f"spec.environment.secrets[{i}]", "secrets", name)
    if spec.scheduling.priority_class is not None:
        yield _Wish("spec.scheduling.priorityClass", "priorityClasses", spec.scheduling.priority_class)
    if spec.network.host_network:
        yield _Wish("spec.network.hostNetwork", "podFields", "hostNetwork")
    if not spec.network.network_policy:
        yield _Wish("spec.network.networkPolicy", "openNetwork")
    if not uses_token(spec, settings):
        yield _Wish("spec.network.rayAuthentication", "openRay")
    yield from _of_resources(spec)
    for i, volume in enumerate(spec.storage.volumes):
        at = f"spec.storage.volumes[{i}]"
        if volume.host_path is not None:
            yield _Wish(f"{at}.hostPath", "hostPaths", volume.host_path)
        yield from _of_source(f"{at}.source", volume.source or {})
    yield from _of_annotations("spec.pods.annotations", spec.pods.annotations)
    for role in ("head", "worker"):
        yield from _of_template(f"spec.pods.{role}", getattr(spec.pods, role))


def _of_resources(spec: RLJobSpec) -> Iterator[_Wish]:
    overrides, cache = spec.resources.overrides, spec.resources.tuning.compile_cache_path
    if overrides.runtime_class is not None:
        yield _Wish("spec.resources.overrides.runtimeClass", "podFields", "runtimeClassName")
    if overrides.driver_path is not None:
        yield _Wish("spec.resources.overrides.driverPath", "readOnlyHostPaths", overrides.driver_path)
    for i, path in enumerate(overrides.host_mounts or ()):
        yield _Wish(f"spec.resources.overrides.hostMounts[{i}]", "readOnlyHostPaths", path)
    if cache is not None:
        yield _Wish("spec.resources.tuning.compileCachePath", "hostPaths", cache)


def _of_source(at: str, source: Manifest) -> Iterator[_Wish]:
    """Requests of one volume's source; a template's volume has its name beside it."""
    for kind, value in source.items():
        if kind in ("name", "$patch") or value is None:
            continue
        if kind == "hostPath":
            yield _Wish(f"{at}.hostPath", "hostPaths", _text(value, "path"))
        elif kind == "secret":
            yield _Wish(f"{at}.secret", "secrets", _text(value, "secretName"))
        else:
            yield _Wish(at, "volumeTypes", kind)
            for field in ("secretRef", "nodePublishSecretRef"):
                if isinstance(value, Mapping) and value.get(field) is not None:
                    yield _Wish(f"{at}.{kind}.{field}", "secrets", _text(value[field], "name"))
            if isinstance(value, Mapping) and value.get("secretName") is not None:
                yield _Wish(f"{at}.{kind}.secretName", "secrets", str(value["secretName"]))
            for projected in _items(value, "sources"):
                if projected.get("secret") is not None:
                    yield _Wish(f"{at}.{kind}.sources", "secrets", _text(projected["secret"], "name"))


def _of_annotations(at: str, annotations: Json) -> Iterator[_Wish]:
    for key in annotations if isinstance(annotations, Mapping) else ():
        if key.startswith(_UNCONFINING):
            yield _Wish(at, "privileged", key)


def _of_template(at: str, template: Manifest) -> Iterator[_Wish]:
    metadata, pod = template.get("metadata"), template.get("spec")
    if isinstance(metadata, Mapping):
        yield from _of_annotations(f"{at}.metadata.annotations", metadata.get("annotations"))
    if not isinstance(pod, Mapping):
        return
    at = f"{at}.spec"
    for field in get_args(PodField):
        harmless = (None, True) if field == "hostUsers" else (None, False)
        if pod.get(field) not in harmless:
            yield _Wish(f"{at}.{field}", "podFields", field)
    for field in ("serviceAccountName", "serviceAccount"):
        if pod.get(field) is not None:
            yield _Wish(f"{at}.{field}", "serviceAccounts", str(pod[field]))
    if pod.get("priorityClassName") is not None:
        yield _Wish(f"{at}.priorityClassName", "priorityClasses", str(pod["priorityClassName"]))
    for i, item in enumerate(_items(pod, "imagePullSecrets")):
        yield _Wish(f"{at}.imagePullSecrets[{i}]", "imagePullSecrets", _text(item, "name"))
    for i, volume in enumerate(_items(pod, "volumes")):
        yield from _of_source(f"{at}.volumes[{i}]", volume)
    yield from _of_security(f"{at}.securityContext", pod.get("securityContext"), _POD_SECURITY)
    for part in _CONTAINERS:
        for i, container in enumerate(_items(pod, part)):
            yield from _of_container(f"{at}.{part}[{i}]", container)


def _of_container(at: str, container: Manifest) -> Iterator[_Wish]:
    if container.get("image") is not None:
        yield _Wish(f"{at}.image", "images", str(container["image"]))
    for i, variable in enumerate(_items(container, "env")):
        source = variable.get("valueFrom")
        if isinstance(source, Mapping) and source.get("secretKeyRef") is not None:
            yield _Wish(f"{at}.env[{i}].valueFrom.secretKeyRef", "secrets", _text(source["secretKeyRef"], "name"))
    for i, source in enumerate(_items(container, "envFrom")):
        if source.get("secretRef") is not None:
            yield _Wish(f"{at}.envFrom[{i}].secretRef", "secrets", _text(source["secretRef"], "name"))
    for i, port in enumerate(_items(container, "ports")):
        if port.get("hostPort"):
            yield _Wish(f"{at}.ports[{i}].hostPort", "podFields", "hostNetwork")
    for i, mount in enumerate(_items(container, "volumeMounts")):
        # A mount without a name changes the one that the operator has at the same place.
        if str(mount.get("name", _HOST_MOUNT)).startswith(_HOST_MOUNT) and mount.get("readOnly") is not True:
            yield _Wish(f"{at}.volumeMounts[{i}].readOnly", "privileged", "a profile's mount that may be written to")
    security = container.get("securityContext")
    yield from _of_security(f"{at}.securityContext", security, _CONTAINER_SECURITY)
    capabilities = security.get("capabilities") if isinstance(security, Mapping) else None
    added = capabilities.get("add") if isinstance(capabilities, Mapping) else None
    for name in added if isinstance(added, list) else ():
        if name not in _CAPABILITIES:
            yield _Wish(f"{at}.securityContext.capabilities.add", "privileged", str(name))


def _of_security(at: str, security: Json, baseline: set[str]) -> Iterator[_Wish]:
    for field, value in security.items() if isinstance(security, Mapping) else ():
        if field not in baseline and field != "$patch" and value not in (None, False):
            yield _Wish(f"{at}.{field}", "privileged")
        if field == "seccompProfile" and isinstance(value, Mapping) and value.get("type") == "Unconfined":
            yield _Wish(f"{at}.seccompProfile", "privileged", "Unconfined")


def _items(parent: Json, field: str) -> list[Manifest]:
    values = parent.get(field) if isinstance(parent, Mapping) else None
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(parent: Json, field: str) -> str:
    """A name in an object; what has none is matched by nothing but `*`."""
    value = parent.get(field) if isinstance(parent, Mapping) else None
    return value if isinstance(value, str) else ""
