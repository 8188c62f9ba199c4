"""Output of `kubectl rljob render`: everything that a job becomes, without its token."""

from __future__ import annotations

import yaml

from rljob_api.job import RLJob
from rljob_api.json_types import Json, JsonObject
from rljob_api.safe_text import visible
from rljob_operator.plugin.problems import CommandError
from rljob_operator.render import (
    RenderError,
    RenderSettings,
    driver_manifest,
    render_cluster,
    render_policy,
    render_secret,
    role_environment,
    submission,
)
from rljob_operator.state.observed import JobView
from rljob_operator.state.queue_label import by_queue_label

NO_UID = "00000000-0000-0000-0000-000000000000"
_TITLES = {
    "cluster": "RayCluster",
    "policy": "NetworkPolicy of the job's pods",
    "secret": "Secret with the driver's token, which the operator draws",
    "submission": "Submission: the body of POST /api/jobs/ on the head",
    "manifest": "The manifest that RLJOB_MANIFEST carries to the driver",
    "trainer": "runtime_env of each trainer",
    "rollout": "runtime_env of each rollout engine",
}
PARTS = tuple(_TITLES)


def of_manifest(job: RLJob, namespace: str) -> JobView:
    """A job that is in no cluster; its UID is all zeros."""
    meta = job.metadata
    return by_queue_label(
        JobView(meta.namespace or namespace, meta.name, meta.uid or NO_UID, 1, 0.0, job.spec, labels=meta.labels)
    )


def rendered(job: JobView, settings: RenderSettings, attempt: int) -> dict[str, Json]:
    """The parts by name; None for a part that the job does not have.

    Raises:
        CommandError: the job cannot be rendered; names the field.
    """
    if job.spec is None:
        raise CommandError(f"RLJob {job.name} cannot be rendered: {job.problem}")
    try:
        secret = render_secret(job, "")
        return {
            "cluster": render_cluster(job, settings),
            "policy": render_policy(job, settings),
            "secret": {name: value for name, value in secret.items() if name not in ("data", "stringData")},
            "submission": submission(job, attempt, settings),
            "manifest": driver_manifest(job, settings),
            "trainer": {"env_vars": role_environment(job.spec, "trainer")},
            "rollout": {"env_vars": role_environment(job.spec, "rollout")},
        }
    except RenderError as error:
        hint = " (--worker-image stands for it here)" if error.field == "spec.image" else ""
        raise CommandError(f"RLJob {job.name} cannot be rendered: {error}{hint}") from None


def as_yaml(parts: JsonObject) -> str:
    """Documents with a heading each."""
    texts = []
    for name, content in parts.items():
        body = "# none\n" if content is None else to_yaml(content)
        texts.append(f"# {_TITLES[name]}\n{body}")
    return "---\n".join(texts)


class _Dumper(yaml.SafeDumper):
    """Block style, and no anchors: people read it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(content: object) -> str:
    """YAML in the order in which it was made."""
    text = _dumped(content, allow_unicode=True)
    # YAML takes characters for printable that a terminal obeys, and can escape all beyond ASCII or none.
    return text if visible(text) == text else _dumped(content, allow_unicode=False)


def _dumped(content: object, *, allow_unicode: bool) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode, width=120)
