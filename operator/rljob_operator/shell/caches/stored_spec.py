"""The spec of a stored RLJob, as this version reads it."""

from __future__ import annotations

from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.queue_label import QUEUE_LABEL, labelled_queue
from rljob_api.schema import structural_schema, without_unknown
from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_api.validation import ManifestError, load_manifest
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.state.status_text import clean


def read_spec(item: RLJobObject) -> tuple[RLJobSpec, str]:
    """The spec as far as its fields are known, and what is wrong where it has others.

    The API server keeps out what its CRD does not know, so a field that is not known here is of a newer one. That is no
    reason to turn away from a job that runs; but what the field asks for is not known, so nothing is begun without it.

    Raises:
        ManifestError: with all problems of the fields that are known.
    """
    meta = {"name": item["metadata"]["name"], "namespace": item["metadata"].get("namespace", "")} | _queue(item)
    document = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "spec": item.get("spec")}
    try:
        return load_manifest(document).spec, ""
    except ManifestError as error:
        known = without_unknown(structural_schema(RLJobSpec), item.get("spec"))
        if known == item.get("spec"):
            raise
        spec = load_manifest({**document, "spec": known}).spec
        fields = ", ".join(problem.path for problem in error.problems)
        text = "is known to the CRD in the cluster and not to the operator, which is older; upgrade the operator"
        return spec, clean(f"{fields}: {text}")


def _queue(item: RLJobObject) -> dict[str, dict[str, str]]:
    """Kueue's label where the spec leaves the queue to it; a job that has its devices keeps the queue it was given.

    Other labels and annotations are left out: whatever Kubernetes lets them be, they are no part of the spec.
    """
    scheduling = (item.get("spec") or {}).get("scheduling")
    if not isinstance(scheduling, dict) or scheduling.get("system") != QueueSystem.KUEUE or scheduling.get("queue"):
        return {}
    given = (item.get("status") or {}).get("queue") or labelled_queue(item["metadata"].get("labels"))
    return {"labels": {QUEUE_LABEL: str(given)}} if given else {}
