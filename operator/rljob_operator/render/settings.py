"""The part of every job that comes from the operator's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.spec import RLJobSpec
from rljob_api.wire import names
from rljob_operator.render.job_policy import JobPolicy


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """Defaults for all jobs, and facts about the cluster."""

    worker_image: str = ""
    """Worker image where a job names none and `worker_images` has none for its profile."""
    worker_images: Mapping[str, str] = field(default_factory=dict)
    """Worker image by profile name."""
    kuberay_version: tuple[int, ...] = (1, 5, 1)
    """Version of the KubeRay operator in the cluster, as (major, minor) or (major, minor, patch)."""
    ray_version: str = "2.60.0"
    """Version of Ray in the worker images."""
    label_prefixes: tuple[str, ...] = ()
    """Prefixes (without the slash) of RLJobs' labels that RayClusters get too. Labels without a prefix always go on."""
    sandbox_claims: bool | None = None
    """Whether the operator may make SandboxClaims; None: that is not known here."""
    policy: JobPolicy | None = None
    """The administrator's policy; None: everything is allowed, or the policy is not known here."""
    operator_namespace: str = ""
    """Namespace of the operator's pods, for the NetworkPolicy; empty: pods with the labels in any namespace."""
    operator_pod_labels: Mapping[str, str] = field(
        default_factory=lambda: {"app.kubernetes.io/name": "rljob", "app.kubernetes.io/component": "operator"}
    )
    """Labels of the operator's pods, for the NetworkPolicy; default: those of the chart."""
    driver_port: int = names.DRIVER_PORT
    """Port of the driver's HTTP endpoint on the head."""
    dashboard_port: int = names.DASHBOARD_PORT
    """Port of Ray's job API on the head."""
    gcs_port: int = names.GCS_PORT
    """Port of Ray's control store on the head."""
    client_port: int = names.CLIENT_PORT
    """Port of Ray's client server on the head."""
    agent_port: int = names.AGENT_PORT
    """Port of Ray's agent on every node, which answers the probes."""

    def image(self, spec: RLJobSpec) -> str:
        """The image of a job; empty: it names none, and there is no default for it."""
        return spec.image or self.worker_images.get(spec.resources.profile.value) or self.worker_image

    def token_authentication(self) -> bool:
        """Whether this KubeRay and this Ray know `authOptions.mode: token`.

        KubeRay 1.5.1 brought the field (its release notes), Ray 2.52.0 the feature (KubeRay's validation.go). A version
        without a patch number counts as the minor's first: 1.5 does not have it for certain.
        """
        ray = tuple(int(part) for part in self.ray_version.split(".")[:2])
        kuberay = (*self.kuberay_version, 0, 0)[:3]
        return kuberay >= (1, 5, 1) and ray >= (2, 52)


def short(text: str, limit: int = 80) -> str:
    """Text in quotes, cut so that it fits a message."""
    shown = ascii(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}... ({len(text)} characters)"
