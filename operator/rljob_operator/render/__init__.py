"""From a job to the objects that the cluster gets: pure functions, no I/O."""

from __future__ import annotations

from rljob_operator.render.access import (
    TOKEN_KEY,
    policy_digest,
    policy_name,
    policy_to_apply,
    render_policy,
    render_secret,
)
from rljob_operator.render.cluster import WORKER_GROUP, render_cluster, secret_name, uses_token
from rljob_operator.render.errors import RenderError
from rljob_operator.render.settings import RenderSettings
from rljob_operator.render.submission import driver_manifest, run_folder, submission
from rljob_operator.render.variables import role_environment
from rljob_operator.state.observed import JobView

__all__ = [
    "TOKEN_KEY",
    "WORKER_GROUP",
    "RenderError",
    "RenderSettings",
    "check_renderable",
    "driver_manifest",
    "policy_digest",
    "policy_name",
    "policy_to_apply",
    "render_cluster",
    "render_policy",
    "render_secret",
    "role_environment",
    "run_folder",
    "secret_name",
    "submission",
    "uses_token",
]


def check_renderable(job: JobView, settings: RenderSettings) -> str:
    """What is wrong with a valid spec that cannot be rendered, as a sentence that names the field; empty: nothing."""
    try:
        render_cluster(job, settings)
        render_policy(job, settings)
        submission(job, 0, settings)
        role_environment(job.spec, "trainer") if job.spec else None
    except RenderError as error:
        return str(error)
    return ""
