"""The user's pod templates, `spec.pods.head` and `spec.pods.worker`: merged over the operator's, last."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.json_types import Json
from rljob_api.kubernetes_names import is_dns_label
from rljob_operator.kubernetes_objects import Manifest, block_of, blocks_of
from rljob_operator.render import names
from rljob_operator.render.errors import RenderError
from rljob_operator.render.merge import merge
from rljob_operator.render.settings import short


def merge_template(template: Manifest, given: Manifest, own_labels: Mapping[str, str], field: str) -> dict[str, Json]:
    """The operator's pod template with the user's merged over it.

    Args:
        template: the operator's.
        given: the user's.
        own_labels: labels that pods are found by; they stay, whatever the user's template says.
        field: of the user's, in the manifest.

    Raises:
        RenderError: where the outcome would be no pod template.
    """
    for key in given:
        if key not in ("metadata", "spec"):
            raise RenderError(field, f"{short(key)} is no part of a pod template: metadata and spec are")
    merged = merge(template, given, field)
    metadata = block_of(merged, "metadata")
    labels = _strings(metadata, f"{field}.metadata", "labels")
    added = {key: value for key, value in labels.items() if key not in own_labels}
    names.check_labels(f"{field}.metadata.labels", added, own=True)
    names.check_annotations(f"{field}.metadata.annotations", _strings(metadata, f"{field}.metadata", "annotations"))
    ray = blocks_of(block_of(template, "spec"), "containers")[0]["name"]
    _check_parts(block_of(merged, "spec"), f"{field}.spec", str(ray))
    merged["metadata"] = {**metadata, "labels": {**labels, **own_labels}}
    return merged


def _strings(metadata: Manifest, field: str, part: str) -> dict[str, str]:
    values = metadata.get(part, {})
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RenderError(f"{field}.{part}", "is no mapping of strings to strings")
    return values


def _check_parts(pod: Manifest, field: str, ray: str) -> None:
    containers = blocks_of(pod, "containers")
    if not containers or containers[0].get("name") != ray:
        raise RenderError(f"{field}.containers", f"the first container is Ray's, {ray}, and cannot be deleted")
    for part in ("containers", "initContainers", "volumes"):
        for item in blocks_of(pod, part):
            name = str(item["name"])
            if not is_dns_label(name):
                raise RenderError(f"{field}.{part}", f"{short(name)} is no name: lower-case letters, digits and '-'")
