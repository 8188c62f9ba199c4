"""The RLJob resource."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rljob_api.base import INT64_MAX, ApiModel
from rljob_api.spec.job import RLJobSpec
from rljob_api.status import RLJobStatus

GROUP = "rljob.dev"
VERSION = "v1alpha1"
KIND = "RLJob"
PLURAL = "rljobs"


class ObjectMeta(ApiModel):
    """Kubernetes object metadata. All but the names, labels and annotations are the API server's."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the job."""
    namespace: str | None = None
    """Namespace of the job."""
    labels: dict[str, str] = {}
    """Labels."""
    annotations: dict[str, str] = {}
    """Annotations."""
    uid: str | None = None
    """Set by the API server."""
    resource_version: str | None = None
    """Set by the API server."""
    generation: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Set by the API server; grows with each change of the spec."""
    generate_name: str | None = None
    """Prefix from which the API server made the name."""
    creation_timestamp: str | None = None
    """Set by the API server."""
    deletion_timestamp: str | None = None
    """Set by the API server."""
    deletion_grace_period_seconds: int | None = None
    """Set by the API server."""
    finalizers: list[str] = []
    """Finalizers to clean up before deletion."""
    owner_references: list[dict[str, Any]] = []
    """Owners."""
    managed_fields: list[dict[str, Any]] = []
    """Set by the API server."""
    self_link: str | None = None
    """Set by old API servers."""


class RLJob(ApiModel):
    """One reinforcement-learning post-training job on a cluster or on this machine."""

    api_version: Literal["rljob.dev/v1alpha1"]
    """Group and version."""
    kind: Literal["RLJob"]
    """Kind."""
    metadata: ObjectMeta
    """Name, labels and what the API server adds."""
    spec: RLJobSpec
    """The job that the user wants."""
    status: RLJobStatus | None = None
    """State that the operator has observed."""
