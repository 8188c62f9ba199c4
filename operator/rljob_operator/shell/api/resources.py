"""The kinds of objects that the operator talks to the API server about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, cast

from rljob_api.job import GROUP, PLURAL, VERSION
from rljob_api.json_types import Json
from rljob_operator.kubernetes_objects import (
    EventObject,
    Item,
    KubeObject,
    LeaseObject,
    PodObject,
    RayClusterObject,
    RLJobObject,
    SandboxClaimObject,
    SecretObject,
)

FIELD_MANAGER = "rljob-operator"
JOB_LABEL = "rljob.dev/job"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"


class JobKey(NamedTuple):
    """Namespace and name of an RLJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Resource(Generic[Item]):
    """One kind of object, as the paths of the API server name it."""

    group: str
    version: str
    plural: str
    spec_fields: Mapping[str, frozenset[str]] | None = None
    """Fields that are read where the kind is watched; None: all. Of a field that holds a list of blocks, the fields of
    these. Pod templates are most of an object."""

    def drop_unread(self, item: Item) -> None:
        """Take out of an object what nobody reads."""
        whole = cast("dict[str, dict[str, Json]]", item)
        whole["metadata"].pop("managedFields", None)
        spec = whole.get("spec")
        if self.spec_fields is not None and isinstance(spec, dict):
            whole["spec"] = {name: _only(spec[name], self.spec_fields[name]) for name in self.spec_fields & spec.keys()}

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of one object, of a namespace's objects, or (without arguments) of all objects of the kind."""
        parts = [f"/apis/{self.group}" if self.group else "/api", self.version]
        parts += [] if namespace is None else ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/".join(parts)

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _only(value: Json, fields: frozenset[str]) -> Json:
    if not isinstance(value, list):
        return value
    return [{name: one[name] for name in fields & one.keys()} for one in value if isinstance(one, dict)]


_WHOLE: frozenset[str] = frozenset()
RLJOBS: Resource[RLJobObject] = Resource(GROUP, VERSION, PLURAL)
RAY_CLUSTERS: Resource[RayClusterObject] = Resource(
    "ray.io",
    "v1",
    "rayclusters",
    {"suspend": _WHOLE, "authOptions": _WHOLE, "workerGroupSpecs": frozenset({"groupName", "replicas"})},
)
PODS: Resource[PodObject] = Resource("", "v1", "pods", {"nodeName": _WHOLE})
SECRETS: Resource[SecretObject] = Resource("", "v1", "secrets")
EVENTS: Resource[EventObject] = Resource("", "v1", "events")
NETWORK_POLICIES: Resource[KubeObject] = Resource("networking.k8s.io", "v1", "networkpolicies", {})
SANDBOX_CLAIMS: Resource[SandboxClaimObject] = Resource("extensions.agents.x-k8s.io", "v1beta1", "sandboxclaims")
LEASES: Resource[LeaseObject] = Resource("coordination.k8s.io", "v1", "leases")
