"""From a job to the objects that the cluster gets: pure functions, no I/O."""

from __future__ import annotations

from rljob_operator.render.access import (
    DIGEST_ANNOTATION,
    policy_digest,
    policy_to_apply,
    render_claim,
    render_policy,
    render_secret,
)
from rljob_operator.render.check import check_renderable, render_cluster
from rljob_operator.render.errors import RenderError
from rljob_operator.render.job_policy import JobPolicy
from rljob_operator.render.names import SET_LABEL_PREFIXES
from rljob_operator.render.object_names import head_service_name, names_in_use, policy_name, secret_name
from rljob_operator.render.ray_cluster import uses_token
from rljob_operator.render.settings import RenderSettings
from rljob_operator.render.submission import MAX_MANIFEST_BYTES, driver_manifest, run_folder, submission
from rljob_operator.render.variables import role_environment

__all__ = [
    "DIGEST_ANNOTATION",
    "MAX_MANIFEST_BYTES",
    "SET_LABEL_PREFIXES",
    "JobPolicy",
    "RenderError",
    "RenderSettings",
    "check_renderable",
    "driver_manifest",
    "head_service_name",
    "names_in_use",
    "policy_digest",
    "policy_name",
    "policy_to_apply",
    "render_claim",
    "render_cluster",
    "render_policy",
    "render_secret",
    "role_environment",
    "run_folder",
    "secret_name",
    "submission",
    "uses_token",
]
