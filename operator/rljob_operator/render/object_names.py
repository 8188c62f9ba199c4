"""Names of a job's objects, and of those that KubeRay makes for its RayCluster."""

from __future__ import annotations

_KUBERAY_LONGEST = 50


def secret_name(job: str) -> str:
    """Name of the Secret with the driver's bearer token."""
    return f"{job}-driver"


def policy_name(job: str) -> str:
    """Name of the NetworkPolicy of the job's pods; it once was the head's alone, and running jobs have it."""
    return f"{job}-head"


def head_service_name(cluster: str) -> str:
    """Name of the head's Service as KubeRay makes it (`GenerateHeadServiceName`, `CheckName` in its utils/util.go)."""
    name = f"{cluster}-head-svc"[-_KUBERAY_LONGEST:]
    return name if name[0].isalpha() else f"r{name[1:]}"


def names_in_use(job: str, *, ended: bool, token: bool) -> frozenset[tuple[str, str]]:
    """Kinds and names of which no other job can have an object beside this one: job `x-driver` has Ray's token in the
    Secret in which `x` has its driver's, and long names with the same end have one Service.

    Args:
        job: name of the job, and of its RayCluster.
        ended: whether it needs no RayCluster any more.
        token: whether Ray's API asks for a token.
    """
    names = {("Secret", secret_name(job))}
    if not ended:
        names.add(("Service", head_service_name(job)))
        if token:
            names.add(("Secret", job))
    return frozenset(names)
