"""Names, labels and paths as Kubernetes takes them: what breaks its rules is refused here, with the field's name.

The API server would refuse some of it too, but KubeRay's pods only after the RayCluster was accepted, and then nobody
tells the user which field was meant.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.kubernetes_names import is_label_key, is_label_value, is_subdomain
from rljob_operator.render.errors import RenderError
from rljob_operator.render.settings import short

OWN_LABEL_PREFIXES = ("rljob.dev/", "ray.io/")
SET_LABEL_PREFIXES = (
    "rljob.dev", "ray.io", "app.kubernetes.io", "kueue.x-k8s.io", "volcano.sh", "scheduling.volcano.sh",
)  # fmt: skip
"""Prefixes of labels that the operator, KubeRay, Ray or a queueing system set on a RayCluster."""
MAX_ANNOTATIONS_BYTES = 128 * 1024
"""Half of what Kubernetes allows: KubeRay, Volcano and device plugins add theirs."""


def check_name(field: str, text: str | None) -> None:
    """Refuse what is no name of an object."""
    if text is not None and not is_subdomain(text):
        raise RenderError(
            field, f"{short(text)} is no name: lower-case letters, digits, '-' and '.', at most 253 characters"
        )


def check_labels(field: str, labels: Mapping[str, str], *, own: bool = False) -> None:
    """Refuse what are no labels; with `own`, also those that the operator and KubeRay find pods by."""
    for key, value in labels.items():
        check_label_key(field, key)
        if not is_label_value(value):
            raise RenderError(
                field,
                f"{short(key)} has the value {short(value)}, which is no label value: "
                "letters, digits, '-', '_' and '.', at most 63 characters",
            )
        if own and key.startswith(OWN_LABEL_PREFIXES):
            raise RenderError(field, f"{short(key)} belongs to the operator or KubeRay: pods are found by it")


def check_label_key(field: str, key: str) -> None:
    """Refuse what is no key of a label or an annotation."""
    if not is_label_key(key):
        raise RenderError(field, f"{short(key)} is no key: at most 63 letters, digits, '-', '_' and '.', like a.b/name")


def check_annotations(field: str, annotations: Mapping[str, str]) -> None:
    """Refuse what are no annotations."""
    for key in annotations:
        check_label_key(field, key)
    size = sum(len(key) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATIONS_BYTES:
        raise RenderError(field, f"has {size} bytes; at most {MAX_ANNOTATIONS_BYTES} are possible")


def check_path(field: str, path: str | None) -> None:
    """Refuse what is no absolute path that can be mounted."""
    if path is None:
        return
    bad = ":" in path or not path.isprintable() or ".." in path.split("/")
    if not path.startswith("/") or bad:
        raise RenderError(field, f"{short(path)} is no path to mount: absolute, without ':' and '..'")


def check_sub_path(field: str, path: str | None) -> None:
    """Refuse what is no folder inside a volume."""
    if path is not None and (path.startswith("/") or ".." in path.split("/") or not path.isprintable()):
        raise RenderError(field, f"{short(path)} is no folder inside a volume: relative, without '..'")
