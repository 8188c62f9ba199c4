"""Two jobs of a namespace whose objects would have the same names: the older one has them."""

from __future__ import annotations

from collections.abc import Callable

from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.render import RenderSettings, head_service_name, names_in_use, secret_name, uses_token
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.caches.cache import Cache
from rljob_operator.shell.caches.kept_job import kept_job
from rljob_operator.state.observed import JobView
from rljob_operator.state.plan_builder import FINAL


def names_taken(
    job: JobView,
    jobs: Cache[RLJobObject, bytes],
    view_of: Callable[[JobKey, RLJobObject], JobView],
    settings: RenderSettings,
) -> str:
    """Why the names of the job's objects are not free, as a sentence; empty: they are.

    Args:
        job: a job without a RayCluster.
        jobs: all jobs.
        view_of: checks a job's spec; ValueError where its status cannot be read.
        settings: the operator's.
    """
    mine = _names(job, settings)
    for key in _look_alikes(job, jobs):
        kept = jobs.get(*key)
        if kept is None:
            continue
        try:
            other = view_of(key, kept_job(kept))
        except ValueError:
            continue  # This is told where that job is looked at.
        shared = sorted(mine & _names(other, settings))
        if shared and (other.created, other.uid) < (job.created, job.uid):
            kind, name = shared[0]
            text = f"RLJob {other.name}, which is older, has the {kind} {name} that this job would need too"
            return f"{text}; delete that job, or give this one another name."
    return ""


def _names(job: JobView, settings: RenderSettings) -> frozenset[tuple[str, str]]:
    token = job.spec is not None and uses_token(job.spec, settings)
    return names_in_use(job.name, ended=job.status.phase in FINAL, token=token)


def _look_alikes(job: JobView, jobs: Cache[RLJobObject, bytes]) -> list[JobKey]:
    names = {job.name.removesuffix(secret_name("")), secret_name(job.name)}
    service = head_service_name(job.name)
    if not service.startswith(job.name):  # KubeRay has cut it.
        names |= {key.name for key in jobs.jobs() if head_service_name(key.name) == service}
    return [JobKey(job.namespace, name) for name in sorted(names - {job.name})]
